import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.config import LEAST_SHARED
from learner.data.prefix_tree import computed_tokens, prefix_paths
from storage.shard.shared_prefixes import different_beginnings

TEXTS = st.lists(st.lists(st.integers(0, 2) | st.just(70000), min_size=1, max_size=8))
"""Texts of few different tokens, many of which begin alike; one token does not fit in two bytes."""


def counted(texts: list[list[int]], least: int = 1) -> int:
    return different_beginnings([np.array(text, np.int32) for text in texts], least=least)


def test_a_prompt_that_siblings_share_counts_once():
    assert counted([[7, 7, 1, 2], [7, 7, 3], [7, 7, 3, 4], [8]]) == 2 + 2 + 1 + 1 + 1
    assert counted([[1, 2, 3]] * 4) == 3
    assert counted([]) == 0


def test_what_the_learner_does_not_share_counts_for_each():
    texts = [[7] * 3 + [n, n] for n in range(4)]
    assert [counted(texts, least) for least in (1, 3, 4)] == [3 + 4 * 2, 3 + 4 * 2, 4 * 5]
    prompt, answers = [7] * LEAST_SHARED, [[n] * 5 for n in range(4)]
    paths = prefix_paths([np.array(prompt + answer, np.int32) for answer in answers], [0] * 4)
    assert different_beginnings([np.array(prompt + answer) for answer in answers]) == computed_tokens(paths)
    shorter = [np.array(prompt[1:] + answer, np.int32) for answer in answers]
    assert different_beginnings(shorter) == computed_tokens(prefix_paths(shorter, [0] * 4)) == 4 * 36


@given(TEXTS)
@settings(max_examples=40)
def test_it_counts_what_is_different_of_all_beginnings(texts):
    assert counted(texts) == len({tuple(text[: n + 1]) for text in texts for n in range(len(text))})
