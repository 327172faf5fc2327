"""The suites of the Makefile have all of their tests, and begin with the longest files."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import LONGEST, pytest_collection_modifyitems

TESTS = Path(__file__).parents[1]


def item_of(path: Path, *markers: str) -> SimpleNamespace:
    """What is collected of a test with these markers."""
    return SimpleNamespace(path=path, get_closest_marker=lambda name: name in markers)


def test_a_file_that_gets_a_marker_from_elsewhere_is_refused(tmp_path: Path):
    path = tmp_path / "test_mine.py"
    path.write_text("pytestmark = [helper.MARKER, pytest.mark.slow]\n")
    pytest_collection_modifyitems([item_of(path, "slow", "nats")])
    with pytest.raises(pytest.UsageError, match=r"test_mine\.py has tests of pytest\.mark\.sglang"):
        pytest_collection_modifyitems([item_of(path, "slow", "sglang")])


def test_whole_runs_and_the_longest_files_come_first():
    longest = min(LONGEST)
    items = [item_of(TESTS / path) for path in ("bus/test_bus.py", f"bus/{longest}", "e2e/test_run.py")]
    pytest_collection_modifyitems(items)
    assert [item.path.name for item in items] == ["test_run.py", longest, "test_bus.py"]


def test_the_longest_files_are_there():
    assert {path.name for path in TESTS.rglob("test_*.py")} >= LONGEST
