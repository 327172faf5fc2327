"""The script that makes the table of versions, and that the table is of what SGLang's releases pin."""

import re
from pathlib import Path

import pytest

import versions

ROWS = re.compile(r"^\| (0\.5\.\d+) \| (\S+) \| (\S+) \| (\S+) \|", re.MULTILINE)


def test_a_test_counts_as_refused_where_its_error_names_the_version_that_is_needed(tmp_path: Path):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="passes"/>'
        '<testcase classname="a" name="skips"><skipped message="no GPU"/></testcase>'
        '<testcase classname="a" name="old"><failure message="ConfigError: a gpt_oss needs transformers 5.19 '
        'or later, and 5.12.1 is installed">...</failure></testcase>'
        '<testcase classname="a" name="wrong"><failure message="assert 0.5 == 1">...</failure></testcase>'
        "</testsuite></testsuites>"
    )
    assert versions.outcome(report) == versions.Outcome(1, ("a::old",), ("a::wrong",))


@pytest.mark.slow
def test_the_table_says_what_releases_of_sglang_pin():
    page = (Path(__file__).parents[2] / "docs/gpu-host.md").read_text()
    rows = ROWS.findall(page)
    assert len(rows) >= 3
    for release, torch, transformers, _ in rows:
        pinned = versions.pins(release)
        assert (pinned["torch"], pinned["transformers"]) == (torch, transformers), release
