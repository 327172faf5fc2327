"""What is told of a trajectory besides its text, in the terminal and in an export."""

from collections.abc import Iterator
from math import isfinite

from bus.codec import Json
from bus.trajectory import SOURCE, Trajectory
from launch.trajectories.search import known_reward
from launch.trajectories.training import GroupTraining, is_greedy
from learner.data.outcomes import ImportanceRatios


def spans(t: Trajectory) -> Iterator[tuple[int, int, int | None]]:
    """Yield the parts of a trajectory as tokens [start, stop), with the number of the turn, if it is one."""
    end = 0
    for number, turn in enumerate(t.turns):
        if turn.start > end:
            yield end, turn.start, None
        yield turn.start, turn.stop, number
        end = turn.stop
    if len(t.token_ids) > end:
        yield end, len(t.token_ids), None


RATIOS = ("importance_ratio", "importance_ratio_min", "importance_ratio_max", "truncated_fraction")


def facts_of(t: Trajectory, training: GroupTraining) -> dict[str, Json]:
    """Return the facts of a trajectory, whose names docs/operations.md describes."""
    evaluation = training.evaluation
    versions = t.policy_versions[t.loss_mask if evaluation is None else t.policy_versions >= 0]
    source = t.metadata.get(SOURCE)
    return {
        "trajectory_id": t.trajectory_id,
        "lease_id": t.lease_id,
        "rollout": t.rollout,
        "agent": t.agent,
        "policy": t.policy,
        "actor": t.actor,
        "source": None if source is None else str(source),
        "label": training.label,
        "reward": known_reward(t),
        "reward_components": dict(t.reward_components),
        "reward_source": t.reward_source,
        "advantage": training.advantage(t),
        **ratios_of(training.importance_ratios(t)),
        "end": t.end,
        "trained": t.is_trained,
        "training": training.told(t),
        "tokens": len(t.token_ids),
        "masked_tokens": int(t.loss_mask.sum()),
        "oldest_version": int(versions.min()) if len(versions) else None,
        "newest_version": int(versions.max()) if len(versions) else None,
        "held_out": evaluation is not None,
        "evaluated_version": evaluation and evaluation.policy_version,
        "data_set": evaluation and evaluation.data_set,
        "greedy": is_greedy(t),
        "metadata": dict(t.metadata),
    }


def ratios_of(known: ImportanceRatios | None) -> dict[str, Json]:
    """Return the importance ratios by the names of an export, None for what JSON has not."""
    values = (None,) * len(RATIOS) if known is None else known
    finite = (value if value is not None and isfinite(value) else None for value in values)
    return dict(zip(RATIOS, finite, strict=True))
