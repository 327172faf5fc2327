"""Diagnostics of how far the data is from the current policy, from sums over micro-batches and ranks.

Whatever needs more than a sum, such as a percentile, comes from a histogram with fixed bins."""

from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from learner.algorithms.tokens import LARGEST_LOG_RATIO, LossTokens

_DISTANCES = tuple(LARGEST_LOG_RATIO * 0.8**n for n in range(35))[::-1]
RATIO_EDGES = (*(-distance for distance in reversed(_DISTANCES)), *_DISTANCES)
"""Upper edges in nats of the bins of log ratios, from 1 % upwards each a quarter farther from 0 than the one
before; one more bin holds what is beyond the last."""
STALENESS_EDGES = (0, 1, 2, 4, 8, 16, 32)
"""Largest staleness, in versions, of each bin of tokens; one more bin holds what is beyond the last."""
WEIGHT_EDGES = (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)
"""Largest importance ratio of each bin of tokens that a chart shows; one more bin holds what is beyond."""
COUNTED = ("clipped", "truncated", "rejected")
"""Tokens that losses, corrections and rejections count."""
REJECTED_BY = "rejected_by_"
"""How the tokens are called that one of them alone rejects; others may reject them as well."""
PERCENTILE = 0.99


def counted(sums: Mapping[str, object]) -> list[str]:
    """Return what was counted by token, by the names that figures begin with."""
    told = [name for name in sums if name.startswith(REJECTED_BY) and name.endswith("_tokens")]
    return [name for name in COUNTED if f"{name}_tokens" in sums] + [n.removesuffix("_tokens") for n in told]


def off_policy_sums(tokens: LossTokens) -> dict[str, Tensor]:
    """Return the sums over N trained tokens that `off_policy_diagnostics` turns into figures, float64 []."""
    advantages = tokens.streams["advantages"]
    log_ratio = (tokens.logprobs.detach() - tokens.streams["behaviour_logprobs"]).double()
    # One impossible log-prob among the recorded ones must not overflow the squares of a step that is trained.
    ratio = log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()
    distance = log_ratio.abs()
    staleness = (tokens.policy_version - tokens.streams["policy_versions"]).clamp(min=0)
    equal = tokens.streams["policy_versions"] == tokens.policy_version
    older_kv = tokens.streams["over_older_kv"]
    fresh = equal & ~older_kv
    sums = {
        "tokens": torch.ones_like(ratio),
        "ratio": ratio,
        "ratio_squared": ratio.square(),
        "chi_square": (ratio - 1).square(),
        "k1": -log_ratio,
        "k3": ratio - 1 - log_ratio,
        "positive": advantages > 0,
        "negative": advantages < 0,
        "fresh": fresh,
        "fresh_distance": torch.where(fresh, distance, 0.0),
        "fresh_equal": fresh & (log_ratio == 0.0),
        "stale": ~equal,
        "stale_distance": torch.where(equal, 0.0, distance),
        "equal_over_older_kv": equal & older_kv,
        "equal_over_older_kv_distance": torch.where(equal & older_kv, distance, 0.0),
        **_split("older_kv", older_kv, ratio, log_ratio),
        **_split("own_kv", ~older_kv, ratio, log_ratio),
    }
    return {
        **{name: values.sum(dtype=torch.float64) for name, values in sums.items()},
        **_histogram("ratio", log_ratio, RATIO_EDGES),
        **_histogram("weight", ratio, WEIGHT_EDGES),
        **_histogram("staleness", staleness, STALENESS_EDGES),
    }


def ratios_by_sequence(tokens: LossTokens, truncated: Tensor | None) -> Tensor:
    """Return what `learner.data.outcomes.ImportanceRatios` are made of, float64 [5, sequences].

    They are the number of trained tokens, of those that were `truncated`, bool [N], and the sum, the largest
    and the least of the importance ratios, the least with its sign changed: ranks that share a sequence add
    up the first three, and take the largest of the others. The second is NaN where a correction of the user's
    has added up by itself what it `truncated`."""
    log_ratio = (tokens.logprobs.detach() - tokens.streams["behaviour_logprobs"]).double()
    ratio = log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()
    cut = torch.zeros_like(ratio)
    if truncated is not None:
        cut = truncated.double() if truncated.ndim else cut.fill_(torch.nan)
    nothing, none = ratio.new_zeros(tokens.sequences), ratio.new_full((tokens.sequences,), -torch.inf)
    return torch.stack([
        *(nothing.index_add(0, tokens.sequence, values) for values in (torch.ones_like(ratio), cut, ratio)),
        *(none.scatter_reduce(0, tokens.sequence, values, "amax") for values in (ratio, -ratio)),
    ])  # fmt: skip


def _split(name: str, among: Tensor, ratio: Tensor, log_ratio: Tensor) -> dict[str, Tensor]:
    """Return what the sums of some of the N tokens are made of, [N] each; `among` says which, bool [N]."""
    values = {
        "tokens": torch.ones_like(ratio),
        "ratio": ratio,
        "ratio_squared": ratio.square(),
        "k1": -log_ratio,
        "k3": ratio - 1 - log_ratio,
    }
    return {f"{name}_{what}": torch.where(among, value, 0.0) for what, value in values.items()}


def _histogram(name: str, values: Tensor, edges: Sequence[float]) -> dict[str, Tensor]:
    """Count values [N] by the first of `edges` that is not below them."""
    found = torch.bucketize(values, _on_device(edges, values.dtype, values.device))
    counts = torch.zeros(len(edges) + 1, dtype=torch.float64, device=values.device)
    counts = counts.index_add(0, found, torch.ones_like(found, dtype=torch.float64))  # bincount would wait
    return {_bin(name, i): count for i, count in enumerate(counts.unbind())}


@cache
def _on_device(edges: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(edges, dtype=dtype, device=device)


def _bin(name: str, number: int) -> str:
    return f"{name}_bin_{number}"


def off_policy_diagnostics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return figures from the sums of `off_policy_sums`; what there are no tokens for is left out.

    The ratio is that of the current policy to the one that sampled, whatever weights the objective makes of
    it. `ess_fraction` is the effective sample size (sum w)^2 / (N sum w^2). `k1_nats` and `k3_nats` estimate
    KL(behaviour || current) (joschu.net/blog/kl-approx.html), `chi_square` is the mean of (w - 1)^2.
    `importance_ratio_p99` and `_max` are read from a histogram: the first is interpolated within a bin, the
    second is the upper edge of the last bin that holds a token. `mismatch_nats` is the mean |log ratio| of
    tokens sampled by equal weights over keys and values of these weights, which is an error of the engine or
    the trainer; `mismatch_older_kv_nats` is that of tokens sampled by equal weights over keys and values of
    older ones, and `drift_nats` that of tokens from other versions. `bit_equal_fraction` is the share of the
    tokens of `mismatch_nats` whose log ratio is exactly 0. `older_kv_fraction` is the share of tokens over
    keys and values of older weights than their own; where there are any, the names that end with `_older_kv`
    and `_own_kv` are figures of these tokens and of all others. `stale_tokens_0`, `_1`, `_2`, `_4` and so on
    are shares of the tokens whose staleness is at most that many versions and above the bound before;
    `ratio_tokens_0.5`, `_0.8` and so on are the same of their importance ratio."""
    means = {
        "importance_ratio": (sums["ratio"], sums["tokens"]),
        "ess_fraction": (sums["ratio"] ** 2, sums["tokens"] * sums["ratio_squared"]),
        "chi_square": (sums["chi_square"], sums["tokens"]),
        "k1_nats": (sums["k1"], sums["tokens"]),
        "k3_nats": (sums["k3"], sums["tokens"]),
        "stale_fraction": (sums["stale"], sums["tokens"]),
        "mismatch_nats": (sums["fresh_distance"], sums["fresh"]),
        "mismatch_older_kv_nats": (sums["equal_over_older_kv_distance"], sums["equal_over_older_kv"]),
        "older_kv_fraction": (sums["older_kv_tokens"], sums["tokens"]),
        "bit_equal_fraction": (sums["fresh_equal"], sums["fresh"]),
        "drift_nats": (sums["stale_distance"], sums["stale"]),
        **{
            f"{name}_fraction_{sign}": (sums[f"{name}_tokens_{sign}"], sums[sign])
            for name in counted(sums)
            for sign in ("positive", "negative")
            if f"{name}_tokens_{sign}" in sums
        },
        **{
            f"stale_tokens_{name}": (sums[_bin("staleness", i)], sums["tokens"])
            for i, name in enumerate((*STALENESS_EDGES, "more"))
        },
        **{
            f"ratio_tokens_{name}": (sums[_bin("weight", i)], sums["tokens"])
            for i, name in enumerate((*WEIGHT_EDGES, "more"))
        },
    }
    if sums["older_kv_tokens"] > 0:
        means |= _split_means("older_kv", sums) | _split_means("own_kv", sums)
    found = {name: total / count for name, (total, count) in means.items() if count > 0}
    return found | _largest_ratios([sums[_bin("ratio", i)] for i in range(len(RATIO_EDGES) + 1)])


def _split_means(name: str, sums: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    of = {what: sums[f"{name}_{what}"] for what in ("tokens", "ratio", "ratio_squared", "k1", "k3")}
    return {
        f"ess_fraction_{name}": (of["ratio"] ** 2, of["tokens"] * of["ratio_squared"]),
        f"k1_nats_{name}": (of["k1"], of["tokens"]),
        f"k3_nats_{name}": (of["k3"], of["tokens"]),
    }


def _largest_ratios(counts: Sequence[float]) -> dict[str, float]:
    """Return the 99th percentile and an upper bound of ratios that were counted by `RATIO_EDGES`."""
    total, below = sum(counts), 0.0
    if not total:
        return {}
    edges = torch.tensor([-LARGEST_LOG_RATIO, *RATIO_EDGES, LARGEST_LOG_RATIO], dtype=torch.float64)
    percentile = largest = 0.0
    for count, low, high in zip(counts, edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if count:
            largest = high
            if below < PERCENTILE * total:
                percentile = low + (high - low) * min(1.0, (PERCENTILE * total - below) / count)
        below += count
    ratios = torch.tensor([percentile, largest], dtype=torch.float64).exp().tolist()
    return dict(zip(("importance_ratio_p99", "importance_ratio_max"), ratios, strict=True))
