"""The tiny repositories: what is right passes its tests, and what is there fails those that are shown."""

import pytest

from storage.built_in_tasks.tiny_repositories import REPOSITORIES, SHOWN


def passed(code: str, tests: tuple[tuple[str, str], ...]) -> list[bool]:
    names: dict[str, object] = {}
    exec(code, names)

    def passes(call: str, wanted: str) -> bool:
        try:
            return repr(eval(call, names)) == wanted
        except (AttributeError, IndexError, TypeError, ValueError):
            return False

    return [passes(*test) for test in tests]


@pytest.mark.parametrize("repository", REPOSITORIES, ids=lambda one: one.name)
def test_the_fault_fails_a_test_that_is_shown_and_its_repair_passes_all(repository):
    assert all(passed(repository.right, repository.tests))
    assert not all(passed(repository.wrong, repository.tests[:SHOWN]))


def test_there_are_thirty():
    assert len({one.name for one in REPOSITORIES}) == 30
