"""Warns in words when a figure of a training step leaves the range that it should lie in."""

from collections.abc import Mapping
from math import inf, isfinite
from typing import NamedTuple

import structlog

from bus.codec import Json
from learner.config.diagnostics import DiagnosticsConfig

log = structlog.get_logger()


class Range(NamedTuple):
    """Where a figure should lie, and what it means that it does not."""

    lowest: float
    highest: float
    meaning: str


def ranges(config: DiagnosticsConfig) -> dict[str, Range]:
    """Return the ranges by the names of the figures."""

    def below(highest: float | None, meaning: str) -> Range:
        return Range(-inf, inf if highest is None else highest, meaning)

    def above(lowest: float | None, meaning: str) -> Range:
        return Range(-inf if lowest is None else lowest, inf, meaning)

    ratio = inf if config.largest_mean_ratio is None else config.largest_mean_ratio
    return {
        "policy/ess_fraction": above(
            config.least_ess_fraction,
            "few tokens carry the update, since the policy is far from the one that sampled: lower "
            "admission.max_staleness or learner.optimizer.lr",
        ),
        "policy/importance_ratio": Range(
            1 / ratio,
            ratio,
            "tokens are no longer as likely as when they were sampled, on average: compare "
            "policy/mismatch_nats (engine or trainer) with policy/drift_nats (staleness)",
        ),
        "policy/mismatch_nats": below(
            config.largest_mismatch_nats,
            "engine and learner disagree about tokens of the same weights: compare their dtypes, the "
            "temperature and the versions in the manifest",
        ),
        "policy/rejected_fraction": below(
            config.largest_rejected_fraction,
            "most tokens are thrown away: widen learner.rejection or the mask of learner.correction, or "
            "lower the staleness",
        ),
        "rollout/cut_off_fraction": below(
            config.largest_cut_off_fraction,
            "tokens were drawn with top_p or top_k, but their log-probs are those of all tokens, so that "
            "each was likelier than recorded: set sampling.top_p=1 and sampling.top_k=0",
        ),
        "rollout/completed_fraction": above(
            config.least_completed_fraction,
            "answers are cut off before they end, which a reward of 0 does not tell apart from wrong ones: "
            "raise sampling.max_new_tokens or the turn limit",
        ),
        "policy/entropy_nats": above(
            config.least_entropy_nats,
            "the policy hardly explores any more: set learner.entropy_target.nats, or raise "
            "learner.loss.clip_eps_high",
        ),
    }


class RangeWarnings:
    """Says once when a figure leaves its range, and once when it is back."""

    def __init__(self, config: DiagnosticsConfig) -> None:
        """Begin with every figure in its range."""
        self._ranges = ranges(config)
        self._outside: set[str] = set()

    def look(self, step: int, values: Mapping[str, Json]) -> None:
        """Compare the figures of a step with their ranges; what it does not have stays as it was."""
        for name, (lowest, highest, meaning) in self._ranges.items():
            value = values.get(name)
            if not isinstance(value, float):
                continue
            is_outside = not lowest <= value <= highest  # NaN is outside of every range
            if is_outside and name not in self._outside:
                self._outside.add(name)
                bounds = {"lowest": lowest, "highest": highest}
                log.warning(
                    "figure_out_of_range", figure=name, value=value, step=step, meaning=meaning,
                    **{bound: number for bound, number in bounds.items() if isfinite(number)},
                )  # fmt: skip
            elif not is_outside and name in self._outside:
                self._outside.remove(name)
                log.info("figure_in_range_again", figure=name, value=value, step=step)
