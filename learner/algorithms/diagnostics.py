"""Diagnostics of how far the data is from the current policy, from sums over micro-batches and ranks."""

from collections.abc import Mapping

import torch
from torch import Tensor

from learner.algorithms.tokens import LARGEST_LOG_RATIO, LossTokens


def off_policy_sums(tokens: LossTokens, *, policy_version: int, truncation_cap: float) -> dict[str, Tensor]:
    """Return the sums over tokens that `off_policy_diagnostics` turns into means, float64 [].

    Args:
        tokens: N trained tokens.
        policy_version: version of the current policy.
        truncation_cap: ratio above which a token counts as truncated.
    """
    advantages, versions = tokens.streams["advantages"], tokens.streams["policy_versions"]
    log_ratio = (tokens.logprobs.detach() - tokens.streams["behaviour_logprobs"]).double()
    # One impossible log-prob among the recorded ones must not overflow the squares of a step that is trained.
    ratio = log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()
    distance = log_ratio.abs()
    truncated = ratio > truncation_cap
    fresh = versions == policy_version
    positive, negative = advantages > 0, advantages < 0
    sums = {
        "tokens": torch.ones_like(ratio),
        "ratio": ratio,
        "ratio_squared": ratio.square(),
        "k1": -log_ratio,
        "k3": ratio - 1 - log_ratio,
        "positive": positive,
        "positive_truncated": positive & truncated,
        "negative": negative,
        "negative_truncated": negative & truncated,
        "fresh": fresh,
        "fresh_distance": torch.where(fresh, distance, 0.0),
        "stale": ~fresh,
        "stale_distance": torch.where(fresh, 0.0, distance),
    }
    return {name: values.sum(dtype=torch.float64) for name, values in sums.items()}


def off_policy_diagnostics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return means from the sums of `off_policy_sums`; a mean over no tokens is left out.

    `ess_fraction` is the effective sample size (sum w)^2 / (N sum w^2). `k1_nats` and `k3_nats` estimate
    KL(behaviour || current) (joschu.net/blog/kl-approx.html). `mismatch_nats` is the mean |log ratio| of
    tokens sampled by equal weights, which is an error of the engine or the trainer; `drift_nats` is that of
    tokens from other versions.
    """
    means = {
        "importance_ratio": (sums["ratio"], sums["tokens"]),
        "ess_fraction": (sums["ratio"] ** 2, sums["tokens"] * sums["ratio_squared"]),
        "k1_nats": (sums["k1"], sums["tokens"]),
        "k3_nats": (sums["k3"], sums["tokens"]),
        "truncated_fraction_positive": (sums["positive_truncated"], sums["positive"]),
        "truncated_fraction_negative": (sums["negative_truncated"], sums["negative"]),
        "stale_fraction": (sums["stale"], sums["tokens"]),
        "mismatch_nats": (sums["fresh_distance"], sums["fresh"]),
        "drift_nats": (sums["stale_distance"], sums["stale"]),
    }
    return {name: total / count for name, (total, count) in means.items() if count > 0}
