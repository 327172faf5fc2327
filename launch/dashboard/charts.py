"""The charts of a run: which quantities are drawn together, and those that are computed from others."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf, isfinite, nan

from storage.metrics.records import Record, number

STALENESS_P50 = "staleness/p50_versions"
TOKENS_PER_S = "train/tokens_per_s"
_STALE_TOKENS = "policy/stale_tokens_"


@dataclass(frozen=True)
class Chart:
    """Curves that share an axis."""

    title: str
    unit: str
    curves: dict[str, str] = field(default_factory=dict)
    """Label of each curve, by the name of its quantity in the rows of metrics.jsonl."""
    log: bool = False
    shades: tuple[float, ...] = ()
    """Shade of each curve, from -1 to 1, of a distribution: its curves are shares of a whole, and stacked."""
    prefix: str = ""
    """Beginning of the names of further quantities that are drawn, labelled with the rest of their names."""
    warmup: bool = False
    """Says whether the chart is of the supervised stage, whose steps are counted for themselves."""

    def draws(self, name: str) -> bool:
        return name in self.curves or bool(self.prefix and name.startswith(self.prefix))


_STALENESS = ("0", "1", "2", "4", "8", "16", "32", "more")
_RATIOS = ("0.5", "0.8", "0.95", "1.05", "1.25", "2.0", "more")
CHARTS = (
    Chart("Reward", "mean of a step's trajectories", {"reward/mean": "reward"}),
    Chart(
        "Spread of the reward",
        "standard deviation",
        {"reward/group_std_mean": "within groups", "reward/std": "within a step"},
    ),
    Chart("Parts of the reward", "mean of a step's trajectories", prefix="reward_part/"),
    Chart("Reward by source", "mean of a step's trajectories", prefix="source_reward/"),
    Chart("Parts of the reward by source", "mean of a step's trajectories", prefix="source_reward_part/"),
    Chart("Loss", "", {"train/loss": "loss"}),
    Chart("Entropy", "nats a token", {"policy/entropy_nats": "entropy"}),
    Chart(
        "Response length",
        "tokens",
        {
            "train/response_tokens_mean": "mean",
            "train/response_tokens_p95": "95th percentile",
            "train/response_tokens_max": "longest",
        },
    ),
    Chart("Response length by source", "tokens, mean", prefix="source_response_tokens/"),
    Chart("Gradient norm", "", {"train/grad_norm": "gradient norm"}, log=True),
    Chart(
        "Staleness", "policy versions", {STALENESS_P50: "median token", "staleness/max_versions": "largest"}
    ),
    Chart(
        "Distribution of staleness",
        "share of tokens, by versions",
        dict(
            zip(
                (f"{_STALE_TOKENS}{bound}" for bound in _STALENESS),
                ("0", "1", "2", "3 to 4", "5 to 8", "9 to 16", "17 to 32", "more"),
                strict=True,
            )
        ),
        shades=(0.12, 0.28, 0.42, 0.56, 0.7, 0.8, 0.9, 1.0),
    ),
    Chart(
        "Importance weights",
        "ratio",
        {
            "policy/importance_ratio": "mean",
            "policy/importance_ratio_p99": "99th percentile",
            "policy/importance_ratio_max": "largest",
        },
    ),
    Chart(
        "Distribution of importance weights",
        "share of tokens, by ratio",
        dict(
            zip(
                (f"policy/ratio_tokens_{bound}" for bound in _RATIOS),
                ("to 0.5", "to 0.8", "to 0.95", "0.95 to 1.05", "to 1.25", "to 2", "more"),
                strict=True,
            )
        ),
        shades=(-1.0, -0.6, -0.3, 0.0, 0.3, 0.6, 1.0),
    ),
    Chart("Effective sample size", "fraction of tokens", {"policy/ess_fraction": "effective"}),
    Chart(
        "Engine and learner",
        "share of the trained version's tokens",
        {"policy/bit_equal_fraction": "same log-prob to the bit"},
    ),
    Chart("Throughput", "trained tokens a second", {TOKENS_PER_S: "trained"}),
    Chart(
        "Time of a step",
        "seconds",
        {
            "time/step_s": "whole step",
            "time/waiting_for_batch_s": "waiting for the batch",
            "time/logprobs_s": "log-probs",
            "time/update_s": "updates",
            "time/optimizer_s": "optimizer, of these",
            "time/publish_stall_s": "waiting for publication",
            "time/checkpoint_s": "checkpoint after the step before",
        },
    ),
    Chart("Use of the GPUs", "MFU: share of their peak", {"train/mfu": "updates"}),
    Chart(
        "Memory of the first GPU",
        "GiB",
        {"memory/gpu_peak_gib": "peak of tensors", "memory/gpu_reserved_gib": "peak reserved"},
    ),
    Chart(
        "Supervised loss",
        "mean of a step, and held out",
        {"train/loss": "loss", "heldout/loss_nats": "held out"},
        warmup=True,
    ),
    Chart(
        "Preference accuracy",
        "share of pairs",
        {"rewards/accuracies": "trained", "heldout/rewards/accuracies": "held out"},
        warmup=True,
    ),
    Chart(
        "Preference rewards",
        "mean of a step's pairs",
        {"rewards/margins": "margin", "rewards/chosen": "chosen", "rewards/rejected": "rejected"},
        warmup=True,
    ),
    Chart("Supervised tokens", "trained tokens of a step", {"train/response_tokens": "trained"}, warmup=True),
)
"""Charts of the overview, in their order; of a quantity that no row has, no curve is drawn."""


def with_computed(row: Record) -> Record:
    """Return the row of a step with the quantities that are computed from others, where those are there."""
    return row | {STALENESS_P50: _median_staleness(row), TOKENS_PER_S: _rate(row)}


def _rate(row: Record) -> float:
    seconds = number(row, "time/step_s")
    return number(row, "train/response_tokens") / seconds if seconds > 0 else nan


def _median_staleness(row: Record) -> float:
    """Return the least staleness that half of the trained tokens do not exceed; NaN without a histogram. The
    histogram's intervals end at powers of two: of those that hold several, the end is returned."""
    below = 0.0
    for bound, fraction in _histogram(row):
        below += fraction
        if below >= 0.5:
            return bound if isfinite(bound) else nan
    return nan


def _histogram(row: Record) -> Iterator[tuple[float, float]]:
    """Return the largest staleness of each interval, and the fraction of tokens in it, ascending."""
    found = [
        (inf if name.endswith("more") else float(name.removeprefix(_STALE_TOKENS)), number(row, name))
        for name in row
        if name.startswith(_STALE_TOKENS)
    ]
    yield from sorted(found)
