import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.shard.shared_beginnings import different_beginnings

TEXTS = st.lists(st.lists(st.integers(0, 2) | st.just(70000), min_size=1, max_size=8))
"""Texts of few different tokens, many of which begin alike; one token does not fit in two bytes."""


def counted(texts: list[list[int]]) -> int:
    return different_beginnings([np.array(text, np.int32) for text in texts])


def test_a_prompt_that_siblings_share_counts_once():
    assert counted([[7, 7, 1, 2], [7, 7, 3], [7, 7, 3, 4], [8]]) == 2 + 2 + 1 + 1 + 1
    assert counted([[1, 2, 3]] * 4) == 3
    assert counted([]) == 0


@given(TEXTS)
@settings(max_examples=100)
def test_it_counts_what_is_different_of_all_beginnings(texts):
    assert counted(texts) == len({tuple(text[: n + 1]) for text in texts for n in range(len(text))})
