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


MEANINGS = {
    "policy/ess_fraction": "few tokens carry the update, since the policy is far from the one that sampled: "
    "lower admission.max_staleness or learner.optimizer.lr, or set admission.ess_brake.below",
    "policy/importance_ratio": "tokens are no longer as likely as when they were sampled, on average: "
    "compare policy/mismatch_nats (engine or trainer) with policy/drift_nats (staleness)",
    "policy/importance_ratio_max": "a token is far likelier than when it was sampled: bound its weight with "
    "learner.correction or a clip, and compare policy/mismatch_nats with policy/drift_nats",
    "policy/k3_nats": "the policy is far from the one that sampled: lower admission.max_staleness or "
    "learner.optimizer.lr",
    "policy/chi_square": "importance weights vary so much that gradients are noise: lower "
    "admission.max_staleness, or bound them with learner.correction",
    "policy/mismatch_nats": "engine and learner disagree about tokens of the same weights: compare their "
    "dtypes, the temperature and the versions in the manifest",
    "policy/drift_nats": "the policy has moved far since older tokens were sampled: lower "
    "admission.max_staleness or learner.optimizer.lr",
    "policy/teacher_kl_nats": "the policy does not come near its teacher, or leaves it: raise coef of "
    "learner.teacher, or lower learner.optimizer.lr",
    "policy/clipped_fraction": "most tokens are clipped and add no gradient: lower learner.optimizer.lr or "
    "learner.batch.updates, or widen the clip",
    "policy/truncated_fraction": "most weights are cut off, so the correction is one in name: lower "
    "admission.max_staleness, or raise the cap of learner.correction",
    "policy/rejected_fraction": "most tokens are thrown away: widen learner.rejection or the mask of "
    "learner.correction, or lower the staleness",
    "policy/entropy_nats": "the policy hardly explores any more: set learner.entropy_target.nats, or raise "
    "learner.loss.clip_eps_high",
    "staleness/queued_mean_versions": "trajectories wait long for the learner: lower "
    "admission.max_staleness, or run fewer actors",
    "staleness/generation_mean_versions": "many versions go by while a trajectory is sampled: shorten "
    "answers, or run more actors with fewer requests each",
    "rollout/cut_off_fraction": "tokens were drawn with top_p, top_k or min_p, but their log-probs are those "
    "of all tokens, so that each was likelier than recorded: set sampling.keep_masks, or sampling.top_p=1, "
    "sampling.top_k=0 and sampling.min_p=0",
    "rollout/completed_fraction": "answers are cut off before they end, which a reward of 0 does not tell "
    "apart from wrong ones: raise sampling.max_new_tokens or the turn limit",
    "selection/length_ratio": "what is trained on has another length than what is sampled: see in launch "
    "status which groups are rejected, and whether time limits or patience cut long answers off",
    "selection/reward_shift": "what is trained on has another mean reward than what is sampled: see in "
    "launch status which groups are rejected, and look at actors.group_filter",
}
"""What a figure out of its range means, and what to do."""


def ranges(config: DiagnosticsConfig) -> dict[str, Range]:
    bounds = _bounds(config)
    return {
        name: Range(-inf if lowest is None else lowest, inf if highest is None else highest, MEANINGS[name])
        for name, (lowest, highest) in bounds.items()
    }


def _bounds(config: DiagnosticsConfig) -> dict[str, tuple[float | None, float | None]]:
    return {
        "policy/ess_fraction": (config.least_ess_fraction, None),
        "policy/importance_ratio": _around_one(config.largest_mean_ratio),
        "policy/importance_ratio_max": (None, config.largest_ratio),
        "policy/k3_nats": (None, config.largest_k3_nats),
        "policy/chi_square": (None, config.largest_chi_square),
        "policy/mismatch_nats": (None, config.largest_mismatch_nats),
        "policy/teacher_kl_nats": (None, config.largest_teacher_kl_nats),
        "policy/drift_nats": (None, config.largest_drift_nats),
        "policy/clipped_fraction": (None, config.largest_clipped_fraction),
        "policy/truncated_fraction": (None, config.largest_truncated_fraction),
        "policy/rejected_fraction": (None, config.largest_rejected_fraction),
        "policy/entropy_nats": (config.least_entropy_nats, None),
        "staleness/queued_mean_versions": (None, config.largest_queued_versions),
        "staleness/generation_mean_versions": (None, config.largest_generation_versions),
        "rollout/cut_off_fraction": (None, config.largest_cut_off_fraction),
        "rollout/completed_fraction": (config.least_completed_fraction, None),
        "selection/length_ratio": _around_one(config.largest_length_ratio),
        "selection/reward_shift": _around_zero(config.largest_reward_shift),
    }


def _around_one(ratio: float | None) -> tuple[float | None, float | None]:
    return (None, None) if ratio is None else (1 / ratio, ratio)


def _around_zero(distance: float | None) -> tuple[float | None, float | None]:
    return (None, None) if distance is None else (-distance, distance)


class RangeWarnings:
    """Says once when a figure leaves its range, and once when it is back."""

    def __init__(self, config: DiagnosticsConfig) -> None:
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
