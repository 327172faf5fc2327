"""Types of transformers that the FSDP backend trains, against transformers itself, and what the docs say."""

import pytest

from tests.learner.backends.fsdp.every_type import listed, text_types, tried

SAMPLE = ("apertus", "cohere", "falcon", "gemma2", "granite", "phi3")


@pytest.mark.slow
def test_the_page_lists_every_type():
    assert sorted(listed()) == text_types()


@pytest.mark.first(2, others=pytest.mark.slow)
@pytest.mark.parametrize("kind", SAMPLE)
def test_a_sample_of_types_is_as_listed(kind):
    assert tried(kind).verdict == listed()[kind]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", sorted(set(listed()) - set(SAMPLE)))
def test_every_type_is_as_listed(kind):
    assert tried(kind).verdict == listed()[kind]
