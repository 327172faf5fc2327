"""Drawing tokens: the right frequencies, the right cuts."""

import numpy as np
import pytest
import torch

from actors.engines.embedded.sampling import Controls, sample

LOGITS = torch.tensor([0.5, -1.0, 2.0, 0.0, -3.0, 1.0])


def draw(rows, *, temperature=1.0, top_p=1.0, top_k=0, logits=LOGITS):
    controls = Controls(
        np.full(rows, temperature, np.float32),
        np.full(rows, top_p, np.float32),
        np.full(rows, top_k, np.int64),
    )
    return sample(logits.expand(rows, -1), controls, torch.Generator().manual_seed(0))


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


def test_rows_keep_their_own_settings():
    controls = Controls(
        np.array([0, 1, 1, 0.01], np.float32), np.array([1, 1e-6, 1, 1], np.float32), np.array([0, 0, 1, 0])
    )
    for seed in range(20):
        tokens, logprobs = sample(LOGITS.expand(4, -1), controls, torch.Generator().manual_seed(seed))
        assert tokens.tolist() == [2, 2, 2, 2]
        np.testing.assert_allclose(logprobs[:3], torch.log_softmax(LOGITS, -1)[2].expand(3), rtol=1e-6)
        assert logprobs[3] > -1e-3


def test_tokens_without_mass_are_never_drawn():
    logits = torch.full((1000,), -torch.inf)
    logits[[3, 500]] = 0.0
    tokens, _ = draw(5000, logits=logits)
    assert set(tokens.tolist()) == {3, 500}
