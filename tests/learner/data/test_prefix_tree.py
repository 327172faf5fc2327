from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.config import LEAST_SHARED
from learner.data.packing import Sample, numbered_packs, pack
from learner.data.prefix_tree import chunks_within, computed_tokens, prefix_paths, prefix_tree
from tests.learner.siblings import PROMPT, TURN, siblings

TEXTS = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), min_size=1, max_size=8)), min_size=1
)
"""Prompts' numbers, and texts of few different tokens: many of them begin alike."""


def arrays(texts: list[list[int]]) -> list[np.ndarray]:
    return [np.array(text, np.int32) for text in texts]


def laid_out(texts: list[list[int]], prompts: list[int], least: int):
    """The tree of texts that share something, texts and prompts in depth-first order."""
    texts, prompts = [*texts, [9] * 8, [9] * 8], [*prompts, 9, 9]
    paths = prefix_paths(arrays(texts), prompts, least=least)
    order = [i for chunk in chunks_within(paths, prompts, 10**6) for i in chunk]
    return prefix_tree([paths[i] for i in order]), [texts[i] for i in order], [prompts[i] for i in order]


def seen_by(tree, row: int) -> list[int]:
    """The computed tokens that a computed token sees, from the first to itself."""
    starts = np.cumsum([0, *tree.lengths])
    segment = int(np.searchsorted(starts, row, side="right")) - 1
    seen = list(range(starts[segment], row + 1))
    while (segment := tree.parents[segment]) >= 0:
        seen = [*range(starts[segment], starts[segment + 1]), *seen]
    return seen


def test_siblings_and_strands_make_the_tree_of_a_drawing():
    texts = [[7, 7, 7, 1], [7, 7, 7, 2, 2], [7, 7, 7, 2, 2, 5, 6], [8, 8]]
    tree, order, _ = laid_out([texts[2], texts[3], texts[0], texts[1]], [0] * 4, least=2)
    assert order[:4] == texts
    assert tree.lengths == (3, 1, 2, 2, 2, 8)  # 777, then 1 and 22, and after 22 then 56; 88; another prompt
    assert tree.parents == (-1, 0, 0, 2, -1, -1)
    assert tree.computed[:18].tolist() == [0, 1, 2, 3, 0, 1, 2, 4, 5, 0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert tree.source[:10].tolist() == [0, 1, 2, 3, 7, 8, 14, 15, 16, 17]


@given(TEXTS)
@settings(max_examples=60)
def test_as_many_tokens_are_computed_as_there_are_different_beginnings(drawn):
    prompts, texts = [prompt for prompt, _ in drawn], [text for _, text in drawn]
    tree, *_ = laid_out(texts, prompts, least=1)
    beginnings = {
        (p, *text[: n + 1]) for p, text in zip(prompts, texts, strict=True) for n in range(len(text))
    }
    assert len(tree.source) == sum(tree.lengths) == len(beginnings) + 8


@given(TEXTS, st.integers(1, 4))
@settings(max_examples=60)
def test_what_a_token_sees_along_its_path_is_its_own_text(drawn, least):
    tree, texts, prompts = laid_out([text for _, text in drawn], [prompt for prompt, _ in drawn], least)
    flat = np.concatenate(arrays(texts))
    owner = np.repeat(prompts, [len(text) for text in texts])
    token = 0
    for text, prompt in zip(texts, prompts, strict=True):
        for n in range(len(text)):
            seen = tree.source[seen_by(tree, int(tree.computed[token]))].numpy()
            assert flat[seen].tolist() == text[: n + 1]
            assert set(owner[seen]) == {prompt}
            token += 1


@given(TEXTS, st.integers(1, 4))
@settings(max_examples=60)
def test_segments_that_others_follow_are_long_enough(drawn, least):
    tree, *_ = laid_out([text for _, text in drawn], [prompt for prompt, _ in drawn], least)
    assert all(tree.lengths[parent] >= least for parent in tree.parents if parent >= 0)


@given(TEXTS, st.integers(1, 30))
@settings(max_examples=60)
def test_chunks_of_a_prompt_keep_to_the_budget_and_hold_each_sequence_once(drawn, budget):
    prompts, texts = [prompt for prompt, _ in drawn], [text for _, text in drawn]
    paths = prefix_paths(arrays(texts), prompts, least=1)
    chunks = chunks_within(paths, prompts, budget)
    assert sorted(i for chunk in chunks for i in chunk) == list(range(len(texts)))
    for chunk in chunks:
        assert len({prompts[i] for i in chunk}) == 1
        assert len(chunk) == 1 or computed_tokens([paths[i] for i in chunk]) <= budget


def test_a_pack_has_the_tokens_of_all_its_trajectories_and_computes_the_prompt_once():
    samples = siblings(prompts=1, answers=3, strands=2)
    [(members, batch)] = numbered_packs(samples, 10**6, share_prefixes=True)
    [plain] = pack([samples[i] for i in members], 10**6)
    for name in ("tokens", "position_ids", "labels", "loss_mask", "trained", "sequence_of_token"):
        assert torch.equal(getattr(batch, name), getattr(plain, name)), name
    lengths = [len(sample.token_ids) for sample in samples]
    strand, ended, longer = lengths[4], PROMPT + TURN, lengths[6]
    own = sum(lengths[:3]) - 3 * PROMPT + lengths[3] + strand - 2 * ended + longer - strand
    assert batch.computed_tokens == PROMPT + TURN + own
    assert plain.computed_tokens == sum(lengths)
    assert torch.equal(batch.predicting, batch.tree.computed[batch.trained])
    assert torch.equal(batch.tokens[batch.tree.source][batch.tree.computed], batch.tokens)


def test_the_budget_is_of_computed_tokens():
    samples = siblings(prompts=4, answers=8, strands=2)
    for budget in (90, 200, 400, 1000):
        batches = pack(samples, budget, share_prefixes=True)
        assert all(batch.computed_tokens <= budget or len(batch.lengths) == 1 for batch in batches)
        assert sum(len(batch.lengths) for batch in batches) == len(samples)
    assert sum(b.computed_tokens for b in batches) < 0.5 * sum(len(s.token_ids) for s in samples)


def test_prompts_of_different_groups_are_not_shared_and_neither_is_a_short_beginning():
    text = np.arange(LEAST_SHARED + 8, dtype=np.int32)
    one = Sample(token_ids=text, loss_mask=text > 3, streams={})
    [apart] = pack([one, replace(one, group=1)], 1000, share_prefixes=True)
    assert apart.computed_tokens == 2 * len(text)
    other = text.copy()
    other[LEAST_SHARED - 1] = 0
    [short] = pack([one, replace(one, token_ids=other)], 1000, share_prefixes=True)
    assert short.computed_tokens == 2 * len(text)
    assert apart.tree is short.tree is None
    [equal] = pack([one, one], 1000, share_prefixes=True)
    assert equal.computed_tokens == len(text)


@pytest.mark.parametrize("multiple", [1, 2, 7])
def test_padding_is_behind_everything(multiple):
    [batch] = pack(siblings(prompts=1), 1000, share_prefixes=True)
    padded = batch.tree.padded(multiple)
    assert len(padded.source) == sum(padded.lengths)
    assert len(padded.source) % multiple == 0
    assert len(padded.source) - batch.computed_tokens < multiple
    assert torch.equal(padded.source[: batch.computed_tokens], batch.tree.source)
    assert len(padded.lengths) - 1 not in padded.parents
