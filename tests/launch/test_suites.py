"""The suites of the Makefile have all of their tests, and begin with the longest files."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import LONGEST, mark_others, pytest_collection_modifyitems

TESTS = Path(__file__).parents[1]


def item_of(
    path: Path, *markers: str, first: tuple[pytest.Mark, ...] = (), nodeid: str = ""
) -> SimpleNamespace:
    """What is collected of a test with these markers."""
    marks: dict[str, object] = {name: name for name in markers}
    return SimpleNamespace(
        path=path,
        nodeid=nodeid,
        get_closest_marker=marks.get,
        iter_markers=lambda name: iter(first),
        add_marker=lambda mark: marks.update({mark.name: mark}),
    )


def test_a_file_that_gets_a_marker_from_elsewhere_is_refused(tmp_path: Path):
    path = tmp_path / "test_mine.py"
    path.write_text("pytestmark = [helper.MARKER, pytest.mark.slow]\n")
    pytest_collection_modifyitems([item_of(path, "slow", "nats")])
    with pytest.raises(pytest.UsageError, match=r"test_mine\.py has tests of pytest\.mark\.sglang"):
        pytest_collection_modifyitems([item_of(path, "slow", "sglang")])


def test_parametrizations_beyond_the_first_get_the_marker_of_the_others():
    first = (
        pytest.mark.first(1, others=pytest.mark.slow).mark,
        pytest.mark.first(3, others=pytest.mark.nightly).mark,
    )
    given = [
        ("a[0]", "slow"),
        ("a[1]", "nats"),
        ("b", "nats"),
        ("a[2]", "nightly"),
        ("a[3]", "nats"),
        ("a[4]", "nats"),
    ]
    items = [
        item_of(TESTS, marker, first=() if test == "b" else first, nodeid=test) for test, marker in given
    ]
    mark_others(items)
    marked = {name: [i.nodeid for i in items if i.get_closest_marker(name)] for name in ("slow", "nightly")}
    assert marked == {"slow": ["a[0]", "a[3]", "a[4]"], "nightly": ["a[2]", "a[4]"]}


def test_whole_runs_and_the_longest_files_come_first():
    longest = min(LONGEST)
    items = [item_of(TESTS / path) for path in ("bus/test_bus.py", f"bus/{longest}", "e2e/test_run.py")]
    pytest_collection_modifyitems(items)
    assert [item.path.name for item in items] == ["test_run.py", longest, "test_bus.py"]


def test_the_longest_files_are_there():
    assert {path.name for path in TESTS.rglob("test_*.py")} >= LONGEST


def test_a_file_of_tests_has_tests():
    assert [path for path in TESTS.rglob("test_*.py") if "def test_" not in path.read_text()] == []
