"""Losses and gradients in float32 are those of their papers' formulas in float64, of long sequences too."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from learner.algorithms.losses.objective import Objective, token_losses
from learner.config.correction import SequenceTIS
from learner.config.learner import LearnerConfig
from learner.data.packing import Sample
from tests.learner.algorithms.loss_inputs import tokens_of
from tests.learner.choices import LOSSES
from tests.learner.objective_formulas import FORMULAS, PickedSample

LENGTHS = (1500, 40, 700, 1, 16000)
LOG_RATIOS = (3.0, -1.5, 2.5, 0.3, 3.5)
"""Nats that the log ratios of each sequence add up to."""
SETTINGS = {
    **{name: {"loss": {"type": name}} for name in sorted(LOSSES)},
    "sequence_tis": {"correction": SequenceTIS(sequence_cap=1e6)},
    "geometric": {"correction": SequenceTIS(over="mean", sequence_cap=1e6)},
    "gmpo": {"loss": {"type": "gmpo", "log_clip_high": 0.4}},
    "decoupled": {"loss": {"type": "ppo_clip", "centre": "proximal", "proximal": "recomputed"}},
}


def drawn() -> tuple[list[PickedSample], list[np.ndarray]]:
    """Return samples, and float32 log-probs that differ from theirs as `LOG_RATIOS` says."""
    draw, samples, logprobs = np.random.default_rng(11), [], []
    for n, (length, log_ratio) in enumerate(zip(LENGTHS, LOG_RATIOS, strict=True)):
        behaviour = draw.uniform(-12, -3, length + 1).astype(np.float32)
        moved = draw.normal(0, 0.1, length + 1)
        now = (behaviour + moved - moved[1:].mean() + log_ratio / length).astype(np.float32)
        proximal = (behaviour + draw.normal(0, 0.02, length + 1)).astype(np.float32)
        mask = np.arange(length + 1) > 0
        sample = Sample(
            token_ids=np.zeros(length + 1, np.int32),
            loss_mask=mask,
            streams={"behaviour_logprobs": behaviour, "proximal_logprobs": proximal},
        )
        picked = torch.from_numpy(draw.random(length) < 0.3)
        own = {field: getattr(sample, field) for field in ("token_ids", "loss_mask", "streams")}
        samples.append(PickedSample(**own, picked=picked, group=n))
        logprobs.append(now[1:])
    return samples, logprobs


def by_formula(learner: LearnerConfig, advantages: list[float]) -> tuple[float, np.ndarray]:
    """Return the sum of the losses and its gradient in the log-probs, in float64."""
    total, leaves = torch.zeros((), dtype=torch.float64), []
    for sample, now, advantage in zip(*drawn(), advantages, strict=True):
        now = torch.from_numpy(now).double().requires_grad_()
        streams = {name: values.astype(np.float64) for name, values in sample.streams.items()}
        sample = replace(sample, streams=streams)
        centre = "proximal" if getattr(learner.loss, "centre", "") == "proximal" else "behaviour"
        old = torch.from_numpy(streams[f"{centre}_logprobs"][1:])
        losses = FORMULAS[learner.loss.type](learner, sample, now, old, torch.tensor(advantage).double())
        total = total + losses.sum()
        leaves.append(now)
    return total.item(), np.concatenate([grad.numpy() for grad in torch.autograd.grad(total, leaves)])


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("sign", [1, -1])
def test_loss_and_gradient_are_those_of_float64(name, sign):
    learner = LearnerConfig(**SETTINGS[name])
    advantages = [sign * each for each in (0.75, -0.5, 1.25, 1.0, -0.25)]
    samples, logprobs = drawn()
    lengths = [len(each) for each in logprobs]
    leaf = torch.from_numpy(np.concatenate(logprobs)).requires_grad_()
    of_tokens = {
        name: np.concatenate([sample.streams[name][1:] for sample in samples]).tolist()
        for name in ("behaviour_logprobs", "proximal_logprobs")
    }
    tokens = tokens_of(
        leaf,
        sequence=tuple(np.repeat(np.arange(len(lengths)), lengths).tolist()),
        advantages=np.repeat(advantages, lengths).tolist(),
        picked_by_covariance=np.concatenate([sample.picked.numpy() for sample in samples]).tolist(),
        **of_tokens,
    )
    objective = Objective.of(learner)
    found = token_losses(objective, tokens)[0].double().sum()
    [gradient] = torch.autograd.grad(found, leaf)
    loss, expected = by_formula(learner, advantages)
    scale = token_losses(objective, tokens)[0].detach().abs().sum().item()
    assert abs(found.item() - loss) / scale < 1e-6
    ends = np.cumsum(lengths)[:-1]
    for ours, theirs in zip(np.split(gradient.numpy(), ends), np.split(expected, ends), strict=True):
        assert np.linalg.norm(ours - theirs) <= 1e-6 * np.linalg.norm(theirs)
