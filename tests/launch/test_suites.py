"""The suites of the Makefile have all of their tests, and begin with the longest files."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import LONGEST, mark_others, pytest_collection_modifyitems

TESTS = Path(__file__).parents[1]


def item_of(path: Path, *markers: str, first: pytest.Mark | None = None, nodeid: str = "") -> SimpleNamespace:
    """What is collected of a test with these markers."""
    marks: dict[str, object] = {name: name for name in markers} | ({} if first is None else {"first": first})
    return SimpleNamespace(
        path=path,
        nodeid=nodeid,
        get_closest_marker=marks.get,
        add_marker=lambda mark: marks.update({mark.name: mark}),
    )


def test_a_file_that_gets_a_marker_from_elsewhere_is_refused(tmp_path: Path):
    path = tmp_path / "test_mine.py"
    path.write_text("pytestmark = [helper.MARKER, pytest.mark.slow]\n")
    pytest_collection_modifyitems([item_of(path, "slow", "nats")])
    with pytest.raises(pytest.UsageError, match=r"test_mine\.py has tests of pytest\.mark\.sglang"):
        pytest_collection_modifyitems([item_of(path, "slow", "sglang")])


def test_all_but_the_first_parametrizations_without_a_suite_get_the_marker_of_the_others():
    first = pytest.mark.first(2, others=pytest.mark.nightly).mark
    given = [("a[0]", ()), ("a[1]", ("slow",)), ("b", ()), ("a[2]", ("nats",)), ("a[3]", ()), ("c[0]", ())]
    items = [
        item_of(Path("test_mine.py"), *markers, first=None if name == "b" else first, nodeid=name)
        for name, markers in given
    ]
    mark_others(items)
    assert [item.nodeid for item in items if item.get_closest_marker("nightly")] == ["a[3]"]


def test_whole_runs_and_the_longest_files_come_first():
    longest = min(LONGEST)
    items = [item_of(TESTS / path) for path in ("bus/test_bus.py", f"bus/{longest}", "e2e/test_run.py")]
    pytest_collection_modifyitems(items)
    assert [item.path.name for item in items] == ["test_run.py", longest, "test_bus.py"]


def test_the_longest_files_are_there():
    assert {path.name for path in TESTS.rglob("test_*.py")} >= LONGEST
