"""How far the data is from the current policy: sums a step can add up over micro-batches and ranks."""

from collections.abc import Mapping

import torch
from torch import Tensor


def off_policy_sums(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    policy_versions: Tensor,
    loss_mask: Tensor,
    *,
    policy_version: int,
    truncation_cap: float,
) -> dict[str, Tensor]:
    """Sums over the mask that `off_policy_diagnostics` turns into means.

    Args:
        logprobs: [T] nats, current policy.
        behaviour_logprobs: [T] nats, recorded by the engine when it sampled.
        advantages: [T].
        policy_versions: int32 [T], the weights that sampled each token.
        loss_mask: [T] bool; elsewhere inputs may be anything, NaN included.
        policy_version: that of `logprobs`.
        truncation_cap: the ratio above which a token counts as truncated.
    """
    log_ratio = torch.where(loss_mask, logprobs.detach() - behaviour_logprobs, 0.0).double()
    ratio = log_ratio.exp()
    distance = log_ratio.abs()
    truncated = ratio > truncation_cap
    fresh = loss_mask & (policy_versions == policy_version)
    stale = loss_mask & (policy_versions != policy_version)
    positive, negative = loss_mask & (advantages > 0), loss_mask & (advantages < 0)
    sums = {
        "tokens": loss_mask,
        "ratio": torch.where(loss_mask, ratio, 0.0),
        "ratio_squared": torch.where(loss_mask, ratio.square(), 0.0),
        "k1": -log_ratio,
        "k3": ratio - 1 - log_ratio,
        "positive": positive,
        "positive_truncated": positive & truncated,
        "negative": negative,
        "negative_truncated": negative & truncated,
        "fresh": fresh,
        "fresh_distance": torch.where(fresh, distance, 0.0),
        "stale": stale,
        "stale_distance": torch.where(stale, distance, 0.0),
    }
    return {name: values.sum(dtype=torch.float64) for name, values in sums.items()}


def off_policy_diagnostics(sums: Mapping[str, float]) -> dict[str, float]:
    """Means from the sums of `off_policy_sums`; a mean over no tokens is left out.

    `ess_fraction` is (sum w)^2 / (N sum w^2). `k1_nats` and `k3_nats` estimate KL(behaviour || current)
    (joschu.net/blog/kl-approx.html). `mismatch_nats` is the mean |log ratio| of tokens sampled by equal
    weights, so an error of the engine or the trainer; `drift_nats` that of tokens from other versions.
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
