"""The trajectories of a group as messages, from what its episodes left behind."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from actors.episodes.episode import AgentTrajectory
from bus.codec import Json
from bus.messages import Lease, Prompt, trajectory_name
from bus.older_kv import older_kv_bytes
from bus.trajectory import SOURCE, TASK_KEYS, Parent, Trajectory


class PlacedPart(NamedTuple):
    """A trajectory of an episode, and its place in the group."""

    place: int
    rollout: int
    part: AgentTrajectory


def trajectories_of(
    lease: Lease, parts: Sequence[PlacedPart], *, size: int, actor: str = ""
) -> list[Trajectory]:
    """Return `parts` as trajectories of the group of `lease`, which has `size` of them when complete."""
    places = {(rollout, part.strand): place for place, rollout, part in parts}
    return [_trajectory(lease, one, size, actor, _parent(lease, one, places)) for one in parts]


def _parent(lease: Lease, one: PlacedPart, places: Mapping[tuple[int, int], int]) -> Parent | None:
    """Return what the trajectory was forked from, unless the environment left that out of the episode."""
    fork = one.part.fork
    if fork is None or (one.rollout, fork.strand) not in places:
        return None
    return Parent(trajectory_name(lease.lease_id, places[one.rollout, fork.strand]), fork.token)


def _named(prompt: Prompt, metadata: Mapping[str, Json]) -> dict[str, Json]:
    """Return a trajectory's metadata with source and task of its prompt, unless it has its own."""
    given = prompt.metadata
    tasks = {key: given[key] for key in TASK_KEYS if isinstance(given.get(key), str | int)}
    source = given.get(SOURCE)
    return {**({SOURCE: source} if isinstance(source, str) else {}), **tasks, **metadata}


def _trajectory(lease: Lease, one: PlacedPart, size: int, actor: str, parent: Parent | None) -> Trajectory:
    place, rollout, part = one
    routed = part.routed_experts
    layers, per_token = (0, 0) if routed is None else routed.shape[1:]
    return Trajectory(
        trajectory_id=trajectory_name(lease.lease_id, place),
        group_id=lease.group_id,
        lease_id=lease.lease_id,
        sample=place,
        group_size=size,
        rollout=rollout,
        token_ids=part.token_ids,
        loss_mask=part.loss_mask,
        behaviour_logprobs=part.behaviour_logprobs,
        policy_versions=part.policy_versions,
        turns=part.turns,
        reward=part.reward,
        end=part.end,
        agent=part.agent,
        policy=part.policy,
        parent=parent,
        trainable=part.trainable,
        reward_components=dict(part.reward_components),
        actor=actor,
        metadata=_named(lease.prompt, part.metadata),
        reward_due=part.reward_due,
        reward_source=part.reward_source,
        run=lease.run,
        routed_experts=b"" if routed is None else routed.tobytes(),
        moe_layers=layers,
        experts_per_token=per_token,
        kept_counts=b"" if part.kept is None else part.kept.counts.tobytes(),
        kept_tokens=b"" if part.kept is None else part.kept.token_ids.tobytes(),
        images=part.images,
        older_kv=older_kv_bytes(part.kv_versions, part.policy_versions),
    )
