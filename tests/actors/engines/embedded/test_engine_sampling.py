"""Drawing tokens: the right frequencies, the right cuts."""

from itertools import accumulate

import numpy as np
import pytest
import torch

from actors.engines.base import Sampling
from actors.engines.embedded.sampling import Controls, sample
from bus.config import MOST_KEPT
from storage.exact_arithmetic import softmax

LOGITS = torch.tensor([0.5, -1.0, 2.0, 0.0, -3.0, 1.0])


def controls_of(*rows: Sampling) -> Controls:
    return Controls(
        np.array([row.temperature for row in rows], np.float32),
        np.array([row.top_p for row in rows], np.float32),
        np.array([row.top_k for row in rows], np.int64),
        np.array([row.min_p for row in rows], np.float32),
        np.array([row.keep_masks for row in rows], np.bool_),
    )


def draw(rows, *, logits=LOGITS, **settings):
    controls = controls_of(*[Sampling(**settings)] * rows)
    return sample(logits.expand(rows, -1), controls, torch.Generator().manual_seed(0))[:2]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature):
    rows = 20_000
    tokens, _ = draw(rows, temperature=temperature)
    expected = torch.softmax(LOGITS / temperature, -1) * rows
    chi_square = ((tokens.bincount(minlength=6) - expected) ** 2 / expected).sum()
    assert chi_square < 20.5  # 5 degrees of freedom, p = 0.001


def test_top_k_keeps_the_likeliest():
    tokens, _ = draw(2000, top_k=2)
    assert set(tokens.tolist()) == {2, 5}


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass():
    probs = torch.softmax(LOGITS, -1)
    tokens, logprobs = draw(2000, top_p=float(probs[2] + probs[5]) - 1e-3)
    assert set(tokens.tolist()) == {2, 5}
    np.testing.assert_allclose(logprobs.exp(), probs[tokens], rtol=1e-6)


def test_a_tiny_top_p_keeps_the_likeliest_token():
    tokens, _ = draw(100, top_p=1e-6)
    assert set(tokens.tolist()) == {2}


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest():
    probs = torch.softmax(LOGITS, -1)
    tokens, _ = draw(2000, min_p=float(probs[0] / probs[2]) - 1e-3)
    assert set(tokens.tolist()) == {0, 2, 5}


RECORDED = (
    Sampling(top_k=3, keep_masks=True),
    Sampling(top_p=0.8, temperature=0.7, keep_masks=True),
    Sampling(min_p=0.2, keep_masks=True),
    Sampling(top_k=5, top_p=0.9, min_p=0.05, temperature=1.5, keep_masks=True),
)


def kept_by_definition(row: Sampling) -> list[int]:
    """The kept tokens in float64, one after the other."""
    probs = torch.softmax(LOGITS.double() / row.temperature, -1).tolist()
    ranked = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept, before = [], 0.0
    for rank, token in enumerate(ranked):
        few = rank < (row.top_k or len(probs))
        likely = probs[token] >= row.min_p * probs[ranked[0]]
        if few and likely and (row.top_p == 1 or before < row.top_p):
            kept.append(token)
        before += probs[token]
    return sorted(kept)


def test_recorded_rows_tell_what_they_kept_and_log_probs_within_it():
    rows = (*RECORDED, Sampling(top_k=2), Sampling(keep_masks=True), Sampling(temperature=0, keep_masks=True))
    for seed in range(30):
        tokens, logprobs, kept = sample(
            LOGITS.expand(len(rows), -1), controls_of(*rows), torch.Generator().manual_seed(seed)
        )
        for n, row in enumerate(rows):
            distribution = torch.log_softmax(LOGITS.double() / (row.temperature or 1.0), -1)
            expected = distribution[tokens[n]]
            if row in RECORDED:
                assert kept[n].tolist() == kept_by_definition(row)
                assert 1 < len(kept[n]) < 6
                expected = expected - distribution[kept_by_definition(row)].logsumexp(0)
                assert tokens[n] in kept[n]
            else:
                assert kept[n].tolist() == []
            assert logprobs[n].item() == pytest.approx(expected.item(), abs=2e-7, rel=2e-7)


def test_a_recorded_set_is_bounded_by_its_likeliest_tokens():
    logits = torch.linspace(1.0, 0.0, MOST_KEPT + 50)
    _, _, [kept] = sample(
        logits[None], controls_of(Sampling(top_p=0.9999, keep_masks=True)), torch.Generator().manual_seed(0)
    )
    assert kept.tolist() == list(range(MOST_KEPT))


def test_rows_keep_their_own_settings():
    controls = controls_of(
        Sampling(temperature=0), Sampling(top_p=1e-6), Sampling(top_k=1), Sampling(temperature=0.01)
    )
    for seed in range(20):
        tokens, logprobs, _ = sample(LOGITS.expand(4, -1), controls, torch.Generator().manual_seed(seed))
        assert tokens.tolist() == [2, 2, 2, 2]
        np.testing.assert_allclose(logprobs[:3], torch.log_softmax(LOGITS, -1)[2].expand(3), rtol=1e-6)
        assert logprobs[3] > -1e-3


def test_tokens_without_mass_are_never_drawn():
    logits = torch.full((1000,), -torch.inf)
    logits[[3, 500]] = 0.0
    tokens, _ = draw(5000, logits=logits)
    assert set(tokens.tolist()) == {3, 500}


ROWS_OF_ALL_KINDS = [
    Sampling(), Sampling(temperature=0), Sampling(temperature=0.7, top_p=0.9, keep_masks=True),
    Sampling(top_k=5), Sampling(min_p=0.02, keep_masks=True),
]  # fmt: skip


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kinds", [ROWS_OF_ALL_KINDS, [Sampling()], [Sampling(temperature=0)]])
def test_rows_that_are_drawn_block_by_block_are_to_the_bit_those_of_all_at_once(kinds, exact, monkeypatch):
    controls = controls_of(*[kind for kind in kinds for _ in range(45 // len(kinds))])  # some blocks of one
    logits, found = 3 * torch.randn(45, 997), []
    for elements in (1 << 20, 1):
        monkeypatch.setattr(softmax, "BLOCK_ELEMENTS", elements)
        generator = torch.Generator().manual_seed(0)
        found.append((sample(logits, controls, generator, exact=exact), torch.rand(1, generator=generator)))
    (whole, after), (ours, after_ours) = found
    assert all(torch.equal(one, other) for one, other in zip(whole[:2], ours[:2], strict=True))
    assert torch.equal(after, after_ours)
    as_lists = [drawn[2] and [ids.tolist() for ids in drawn[2]] for drawn in (whole, ours)]
    assert as_lists[0] == as_lists[1]


def test_a_part_of_the_logits_is_all_that_drawing_takes():
    logits, controls = torch.randn(64, 100_000), controls_of(*[Sampling()] * 64)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as seen:
        sample(logits, controls, torch.Generator())
    events = (event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]")
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    assert 0 < max(accumulate(changes)) < logits.nbytes
