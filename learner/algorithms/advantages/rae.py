"""Rewards relative to a moving average of those that the same agent had before."""

from math import fsum

from bus.agent_rewards import episode_rewards
from bus.errors import ConfigError
from bus.trajectory import Groups, Trajectory
from learner.distributed.exact_sums import SumsOverRanks


def rae_advantages(
    groups: Groups,
    *,
    decay: float,
    metadata_key: str | None,
    sums: SumsOverRanks,
    baselines: dict[str, float],
) -> list[list[float]]:
    """Subtract the agent's baseline, an exponential moving average of its rewards, and move that on.

    Role-conditioned advantages of SPIRAL (arXiv:2506.24119): roles of a game do not win equally often. A
    baseline begins at 0, and is what the agent had before this step, so the gradient stays unbiased and
    groups may be of one. A step's n episodes of mean reward m move it to decay^n * baseline + (1 - decay^n)
    * m, which is what one after the other would do if their rewards were equal; their order does not matter.

    Args:
        groups: trajectories of one prompt each; those that are not trained are in no baseline and get 0.
        sums: adds up over ranks.
        baselines: by agent; changed in place, and kept in checkpoints.

    Raises `ConfigError` for a trained trajectory that lacks the entry."""
    names = [[_name(t, metadata_key) if t.is_trained else "" for t in group] for group in groups]
    advantages = [
        [t.reward - baselines.get(name, 0.0) if t.is_trained else 0.0 for t, name in zip(*pair, strict=True)]
        for pair in zip(groups, names, strict=True)
    ]
    rows: dict[str, list[tuple[float, float]]] = {}
    for group, of_group in zip(groups, names, strict=True):
        for name in dict.fromkeys(name for name in of_group if name):
            own = [t.agent_reward for t, other in zip(group, of_group, strict=True) if other == name]
            [episodes] = episode_rewards(own).values()
            rows.setdefault(name, []).append((len(episodes), fsum(episodes.values())))
    for name, (count, total) in sums(rows).items():
        kept = decay**count
        baselines[name] = float(kept * baselines.get(name, 0.0) + (1 - kept) * total / count)
    return advantages


def _name(trajectory: Trajectory, metadata_key: str | None) -> str:
    name = "/".join(map(_escaped, (trajectory.policy, trajectory.agent)))
    if metadata_key is None:
        return name
    if metadata_key not in trajectory.metadata:
        raise ConfigError(
            f"learner.advantage.metadata_key={metadata_key}, and the metadata of {trajectory.trajectory_id} "
            f"has {sorted(trajectory.metadata)}: have the environment set it, or name another"
        )
    return f"{name}/{_escaped(str(trajectory.metadata[metadata_key]))}"


def _escaped(part: str) -> str:
    return part.replace("%", "%25").replace("/", "%2F")
