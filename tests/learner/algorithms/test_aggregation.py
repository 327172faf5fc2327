"""Tests how the losses of tokens become one number."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from bus.errors import ConfigError
from learner.algorithms.aggregation import aggregated, aggregation
from learner.algorithms.losses.objective import Objective
from learner.backends.megatron.trainer import Trainer
from learner.config.algorithm import (
    ConstantDenominator,
    EpisodeMean,
    PluginAggregation,
    PromptMean,
    SequenceMean,
    TokenMean,
)
from learner.config.loss import GSPOLoss, SFTLoss
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import pack
from tests.learner.tiny import hf_state, random_samples, reference_logits, tiny_model

LENGTHS = [5, 17, 2, 32, 9]
GROUPS = [1, 1, 2, 2, 2]


def weighed(config, losses, groups):
    """The loss of trajectories with these token losses."""
    lengths = np.array([len(each) for each in losses])
    weights, denominators = aggregation(config)(lengths, np.array(groups))
    return sum(w * sum(each) for w, each in zip(weights, losses, strict=True)) / sum(denominators)


def test_the_four_by_hand():
    losses, groups = [[1.0], [3.0, 5.0], [2.0, 2.0, 2.0]], [7, 7, 8]
    assert weighed(TokenMean(), losses, groups) == pytest.approx(15 / 6)
    assert weighed(SequenceMean(), losses, groups) == pytest.approx((1 + 4 + 2) / 3)
    assert weighed(PromptMean(), losses, groups) == pytest.approx((9 / 3 + 6 / 3) / 2)
    assert weighed(ConstantDenominator(tokens=10), losses, groups) == pytest.approx((1 + 8 + 6) / 10 / 3)


def test_a_trajectory_without_trained_tokens_is_in_no_mean():
    assert weighed(SequenceMean(), [[], [4.0]], [1, 2]) == 4.0
    assert weighed(PromptMean(), [[], [4.0]], [1, 2]) == 4.0


def test_an_episode_weighs_the_same_however_often_its_agent_forked():
    samples = random_samples(LENGTHS)
    names = ["g1/0", "g1/1", "g1/1", "g1/1", "g2/0"]  # the second episode has three trajectories
    named = [replace(sample, episode=name) for sample, name in zip(samples, names, strict=True)]
    found = aggregated(named, EpisodeMean())
    shares = dict.fromkeys(names, 0.0)
    for sample, name in zip(found, names, strict=True):
        shares[name] += sample.streams["loss_weights"] * sample.trained_tokens
    assert shares == pytest.approx(dict.fromkeys(names, 1.0))
    assert sum(sample.denominator for sample in found) == pytest.approx(3)
    by_token = {found[n].streams["loss_weights"] for n in (1, 2, 3)}
    assert len(by_token) == 1  # each token of an episode has the same weight


def twice(lengths, prompts):
    return 2.0 * np.ones(len(lengths)), np.ones(len(lengths))


def too_few(lengths, prompts):
    return np.ones(1), np.ones(len(lengths))


def test_an_aggregation_of_the_users_own_is_checked():
    samples = random_samples(LENGTHS)
    [first, *_] = aggregated(samples, PluginAggregation(function=f"{__name__}:twice"))
    assert (first.streams["loss_weights"], first.denominator) == (2.0, 1.0)
    with pytest.raises(ConfigError, match="weights of 5 trajectories are"):
        aggregated(samples, PluginAggregation(function=f"{__name__}:too_few"))


def grouped_samples():
    samples = random_samples(LENGTHS)
    return [replace(sample, group=group) for sample, group in zip(samples, GROUPS, strict=True)]


def by_sample(model, samples):
    """Log-probs of each sample's trained tokens, by transformers."""
    logits = torch.split(reference_logits(model, samples), LENGTHS)
    for sample, of_sample in zip(samples, logits, strict=True):
        labels = torch.from_numpy(sample.token_ids[1:]).long()[:, None]
        logprobs = torch.log_softmax(of_sample[:-1], -1).gather(-1, labels)[:, 0]
        yield sample, logprobs, torch.from_numpy(sample.loss_mask[1:])


def stepped(objective, samples, budget):
    model = tiny_model()
    trainer = Trainer(model.config, hf_state(model), OptimizerConfig(lr=1e-3))
    result = trainer.train_step(pack(samples, budget), objective, policy_version=3)
    return result.loss, result.grad_norm


def gradient_norm(loss, model):
    loss.backward()
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize("config", [SequenceMean(), PromptMean(), ConstantDenominator(tokens=20)])
def test_the_mean_is_that_of_the_whole_step_however_it_is_packed(config):
    model, samples = tiny_model(), grouped_samples()
    sums = [-logprobs[mask].sum() for _, logprobs, mask in by_sample(model, samples)]
    counts = [int(mask.sum()) for _, _, mask in by_sample(model, samples)]
    per_prompt = [sum(sums[:2]) / sum(counts[:2]), sum(sums[2:]) / sum(counts[2:])]
    trained = sum(n > 0 for n in counts)
    expected = {
        "sequence_mean": sum(s / max(n, 1) for s, n in zip(sums, counts, strict=True)) / trained,
        "prompt_mean": sum(per_prompt) / 2,
        "constant": sum(sums) / 20 / len(samples),
    }[config.type]
    norm = gradient_norm(expected, model)
    for budget in (1, 1000):
        found = stepped(Objective(SFTLoss()), aggregated(samples, config), budget)
        assert found == pytest.approx((expected.item(), norm), rel=2e-5)


def test_a_loss_over_sequences_has_the_gradient_of_plain_torch():
    model, samples = tiny_model(), grouped_samples()
    losses, count = [], 0
    for sample, logprobs, mask in by_sample(model, samples):
        behaviour = torch.from_numpy(sample.streams["behaviour_logprobs"][1:])
        ratio = (logprobs - behaviour)[mask].mean().exp() if mask.any() else torch.ones(())
        free, clipped = (x * sample.streams["advantages"] for x in (ratio, ratio.clamp(0.8, 1.3)))
        losses.append(-torch.minimum(free, clipped) * mask.sum())
        count += int(mask.sum())
    expected = sum(losses) / count
    norm = gradient_norm(expected, model)
    objective = Objective(GSPOLoss(sequence_clip_eps=0.2, sequence_clip_eps_high=0.3))
    for budget in (1, 1000):
        assert stepped(objective, samples, budget) == pytest.approx((expected.item(), norm), rel=2e-5)
