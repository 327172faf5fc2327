"""From prompt lease to published group: what an actor does all day."""

import asyncio
from collections import Counter

import structlog

from actors.environments.base import AgentTrajectory, Environment, Episode, Task
from actors.filters import GroupFilter
from actors.policy import Policy
from actors.weights import PolicyFollower
from bus.codec import encode
from bus.connection import Bus
from bus.consume import Inbox, consume
from bus.errors import SluiceError
from bus.messages import GroupRejected, Lease, Trajectory, TrajectoryBatch
from bus.publish import Publisher
from bus.topology import shard_of

log = structlog.get_logger()


class Worker:
    """Takes leases as its engine has room, rolls each prompt out, publishes the group or rejects it."""

    def __init__(
        self, bus: Bus, policy: Policy, environment: Environment, *,
        follower: PolicyFollower, keep: GroupFilter, shards: int, name: str,
    ) -> None:  # fmt: skip
        self.reward_sum = 0.0
        self.counts: Counter[str] = Counter()
        self._bus = bus
        self._policy = policy
        self._environment = environment
        self._follower = follower
        self._keep = keep
        self._shards = shards
        self._name = name
        self._publisher = Publisher(bus)

    async def run(self, stop: asyncio.Event, *, groups_at_once: int) -> None:
        """Work until `stop`, then finish what was begun."""
        inbox = Inbox(self._bus, "TASKS", "rollout")
        await consume(inbox, self._bus, Lease, self._roll_out, stop=stop, concurrency=groups_at_once)

    async def _roll_out(self, lease: Lease) -> None:
        """The lease is acked when this returns: its group is on the stream, or its rejection is."""
        await self._follower.at_least(lease.policy_version)
        tasks = [self._task(lease, sample) for sample in range(lease.samples)]
        outcomes = await asyncio.gather(*(self._episode(task) for task in tasks))
        failures = [outcome for outcome in outcomes if isinstance(outcome, str)]
        if failures:
            await self._reject(lease, "rollout_failed", failures[0])
            return
        episodes = [outcome for outcome in outcomes if isinstance(outcome, Episode)]
        group = [trajectory for episode in episodes for trajectory in episode.trajectories]
        reason = self._reason_to_drop(group)
        if reason:
            name, _, detail = reason.partition(": ")
            await self._reject(lease, name, detail)
            return
        await self._publish(lease, group)

    def _reason_to_drop(self, group: list[AgentTrajectory]) -> str | None:
        """What the filter says; it judges rewards, so a group that lacks one is kept, and counted."""
        if any(trajectory.reward_due for trajectory in group):
            self.counts["groups_with_rewards_due"] += 1
            return None
        return self._keep([trajectory.reward for trajectory in group])

    async def _episode(self, task: Task) -> Episode | str:
        """The episode, or why there is none: a failed rollout is data, not a crash."""
        try:
            return await self._environment.run(task, self._policy.fresh(task.task_id))
        except SluiceError as error:
            log.warning("rollout_failed", task=task.task_id, reason=str(error))
            return f"{type(error).__name__}: {error}"

    async def _publish(self, lease: Lease, group: list[AgentTrajectory]) -> None:
        batch = TrajectoryBatch(
            trajectories=tuple(self._trajectory(lease, n, len(group), part) for n, part in enumerate(group))
        )
        subject = self._bus.subject("trajectories", shard_of(lease.lease_id, self._shards))
        await self._publisher.publish(subject, encode(batch), message_id=lease.group_id)
        self.counts["groups"] += 1
        self.counts["trajectories"] += len(group)
        self.reward_sum += sum(part.reward for part in group if not part.reward_due)

    async def _reject(self, lease: Lease, reason: str, detail: str) -> None:
        event = GroupRejected(lease_id=lease.lease_id, reason=reason, detail=detail, actor=self._name)
        subject = self._bus.subject("events", "rejected")
        await self._publisher.publish(subject, encode(event), message_id=f"rejected-{lease.lease_id}")
        self.counts["rejected"] += 1

    def _trajectory(self, lease: Lease, sample: int, siblings: int, part: AgentTrajectory) -> Trajectory:
        return Trajectory(
            trajectory_id=f"{lease.group_id}.{sample}",
            group_id=lease.group_id,
            lease_id=lease.lease_id,
            sample=sample,
            group_size=siblings,
            token_ids=part.token_ids,
            loss_mask=part.loss_mask,
            behaviour_logprobs=part.behaviour_logprobs,
            policy_versions=part.policy_versions,
            reward=part.reward,
            agent=part.agent,
            finish_reason=part.finish_reason,
            actor=self._name,
            reward_due=part.reward_due,
            run=lease.run,
        )

    def _task(self, lease: Lease, sample: int) -> Task:
        prompt = lease.prompt
        return Task(
            task_id=f"{lease.group_id}.{sample}",
            prompt=prompt.content,
            label=prompt.label,
            metadata=prompt.metadata,
        )
