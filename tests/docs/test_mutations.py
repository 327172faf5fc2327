"""What `make mutants` replaces is in the code, once."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
MUTATIONS = runpy.run_path(str(ROOT / "tests" / "mutants" / "mutations.py"))["MUTATIONS"]


def test_each_mutation_replaces_a_text_that_is_there_once():
    assert [one.name for one in MUTATIONS if (ROOT / one.file).read_text().count(one.before) != 1] == []


def test_the_tests_of_each_mutation_are_there():
    assert [path for one in MUTATIONS for path in one.tests if not (ROOT / path).exists()] == []
