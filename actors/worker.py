"""The worker of an actor: it takes prompt leases, rolls them out and publishes the groups."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from itertools import count

import structlog

from actors.environments.base import (
    Environment,
    Episode,
    FailedEpisode,
    ScoresGroups,
    Task,
    raised_by_environment,
)
from actors.episode_ends import EpisodeEnds
from actors.group import NOTHING, Group
from actors.group_config import RetriesConfig
from actors.log_throttle import LogThrottle
from actors.policy.policy import Policy
from actors.rewards.base import BudgetSpentError, InvalidRewardError, RewardError
from actors.rewards.group_filters import GroupFilter, reason_to_drop
from actors.tools.base import ToolError
from actors.weights.follow import PolicyFollower
from bus.codec import encode
from bus.connection import Bus
from bus.consume import Inbox, Received, consume_received
from bus.errors import ConfigError, EngineError, EngineLostError, HandBackError, SchemaError, SluiceError
from bus.message_parts import Parts
from bus.messages import GroupRejected, Lease
from bus.publish import Publisher, together
from bus.requests import GroupStatus, GroupStatusRequest, LeaseRequest, LeaseState
from bus.topology import shard_of
from bus.trajectory import TRUSTED_ENDS, End
from storage.dispatch.lease_status import FREE_DELIVERIES, is_suspect

log = structlog.get_logger()
ANSWER_TIMEOUT_S = 2.0
"""How long storage may take to answer; then the lease is rolled out as its message says."""
FAILED_LOG_PERIOD_S = 1.0
LOGGED_CHARACTERS = 1000
MOST_INVALID_REWARDS = 200
"""Rewards in a row that are no numbers after which the reward is taken to be wrong, and the run ends."""
UNANSWERED_LOG_PERIOD_S = 10.0
"""The shortest time between two log lines which say that storage does not answer: each lease finds it out."""
WEIGHTS_PATIENCE_S = 1.0
"""Weights that take longer may never come: the learner may have resumed from further back."""


def _is_cancelled() -> bool:
    """Return whether somebody cancels this task; if nobody does, a `CancelledError` is the rollout's own."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def end_after(error: BaseException) -> End:
    """Return how the trajectories of an episode end that raised `error`, or something because of it."""
    if isinstance(error, RewardError):
        return "reward_error"
    if isinstance(error, EngineError):
        return "engine_error"
    if isinstance(error, ToolError):
        return "tool_error"
    if isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError):
        return "timeout"
    return "environment_error"


def _failed(error: BaseException) -> FailedEpisode:
    return FailedEpisode(end_after(error), f"{type(error).__name__}: {error}")


class Worker:
    """Takes leases, rolls each prompt out, and publishes the group or rejects it."""

    def __init__(
        self, bus: Bus, policy: Policy, environment: Environment, *,
        follower: PolicyFollower, keep: GroupFilter, shards: int, name: str, share_after_s: float | None,
    ) -> None:  # fmt: skip
        self.counts: Counter[str] = Counter()
        self.ends = EpisodeEnds()
        self.retries = RetriesConfig()
        """How often a failed rollout is repeated before it counts as failed."""
        self._bus = bus
        self._policy = policy
        self._environment = environment
        self._follower = follower
        self._keep = keep
        self._shards = shards
        self._name = name
        self._share_after_s = share_after_s
        self._publisher = Publisher(bus)
        self._unanswered = LogThrottle(UNANSWERED_LOG_PERIOD_S)
        self._failures = LogThrottle(FAILED_LOG_PERIOD_S)
        self._invalid_rewards = 0
        """Rewards in a row that were none."""
        self._suspect = asyncio.Lock()
        """Held for a lease that may have killed its actors: so a death accuses one prompt, not all."""
        self._stop = asyncio.Event()

    async def run(self, stop: asyncio.Event, *, groups_at_once: int) -> None:
        """Work until `stop`, then finish what was begun and hand back what waits to begin."""
        self._stop = stop
        parts = Parts(self._bus, on_unreadable=self._on_unreadable)
        inbox = Inbox(self._bus, "TASKS", "rollout", parts)
        await consume_received(inbox, self._bus, Lease, self._on_lease, stop=stop, concurrency=groups_at_once)

    async def _on_lease(self, received: Received[Lease]) -> None:
        """The lease is acked when this returns: its group is on the stream, or its rejection is.

        Raises `SchemaError` for a prompt that is quarantined: it is set aside.
        """
        lease = received.message
        if received.deliveries <= FREE_DELIVERIES:
            await self._roll_out(lease, again=lease.republished)
        elif not is_suspect((await self._state(lease)).attempts):
            await self._attempt(lease)
        else:
            async with self._suspect:
                self._hand_back_at_the_end(lease)
                await self._attempt(lease)

    async def _attempt(self, lease: Lease) -> None:
        """Roll out a lease that came back. The attempt accuses it unless it is seen to end otherwise."""
        try:
            await self._roll_out(lease, again=True, counted=True)
        except (HandBackError, asyncio.CancelledError):  # the actor is stopped, or another lease ended it
            await self._ask(LeaseRequest(lease_id=lease.lease_id, excused=True), lease)
            raise

    async def _roll_out(self, lease: Lease, *, again: bool, counted: bool = False) -> None:
        version = await self._may_sample(lease, asks=again)
        if version is None or (counted and (await self._state(lease, attempt=True)).state == "settled"):
            self.counts["settled"] += 1
            return
        group = Group(lease, self._environment.trajectories_per_episode, self._name)
        if again and group.each is not None:
            group.stored = await self._stored(lease)
            self.counts["reused"] += len(group.stored.samples)
        await self._gather(group, version)
        await self._score(group)
        self._count(group)
        if group.failures and not group.is_usable:
            await self._reject(lease.lease_id, "rollout_failed", group.failures[min(group.failures)].reason)
        elif reason := self._reason_to_drop(group):
            name, _, detail = reason.partition(": ")
            await self._reject(lease.lease_id, name, detail)
        else:
            await self._publish(group)
            self.counts["groups"] += 1

    def _reason_to_drop(self, group: Group) -> str | None:
        """Return what the filter says; it judges rewards, so a group that lacks one is kept, and counted."""
        if group.rewards_due:
            self.counts["groups_with_rewards_due"] += 1
            return None
        return reason_to_drop(self._keep, group.rewards, group.sizes)

    async def _score(self, group: Group) -> None:
        """Give the episodes the rewards that depend on all of the group, where the environment has such."""
        episodes = group.unfailed
        if not episodes or not isinstance(self._environment, ScoresGroups):
            return
        scored: Mapping[int, Episode | FailedEpisode]
        try:
            scored = await self._environment.score_group(episodes)
        except (EngineLostError, HandBackError, MemoryError):
            raise
        # Whatever an environment raises costs its own group alone.
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            self._tell_of_failure(self._task(group.lease, min(episodes)), error)
            scored = dict.fromkeys(episodes, _failed(error))
        for sample, outcome in scored.items():
            if outcome is not episodes[sample]:
                group.add(sample, outcome)

    def _count(self, group: Group) -> None:
        """Count how the episodes ended that were rolled out here."""
        self.counts["failed_episodes"] += len(group.failures)
        self.ends.add(episode.end for episode in group.episodes.values())
        if len(group.failures) < len(group.episodes):
            self._invalid_rewards = 0

    async def _gather(self, group: Group, version: int) -> None:
        """Roll out what is missing, and send what is finished ahead of siblings that take long.

        Raises `HandBackError`, plain, when one of them is to be done elsewhere."""
        try:
            await self._gather_all(group, version)
        except ExceptionGroup as errors:
            handed_back, others = errors.split(HandBackError)
            if handed_back is None or others is not None:
                raise
            raise handed_back.exceptions[0] from None

    async def _gather_all(self, group: Group, version: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            running = {
                tasks.create_task(self._episode(group.lease, sample, version)): sample
                for sample in group.missing
            }
            while running:
                patience_s = group.shared_in_s(self._share_after_s)
                done, _ = await asyncio.wait(running, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    group.add(running.pop(task), task.result())
                if not group.may_become_usable:
                    for task in running:
                        task.cancel()
                    return
                if running and group.shared_in_s(self._share_after_s) == 0:
                    await self._publish(group)

    async def _episode(self, lease: Lease, sample: int, version: int) -> Episode | FailedEpisode:
        """Return the episode, or why there is none. A failed rollout is repeated as the settings say."""
        for repeated in count():
            outcome = await self._rollout(lease, sample, version)
            trusted = outcome.end in TRUSTED_ENDS
            if trusted or repeated >= self.retries.of(outcome.end) or self._stop.is_set():
                return outcome
            self.counts["repeated_episodes"] += 1
        raise AssertionError("count() does not end")

    async def _rollout(self, lease: Lease, sample: int, version: int) -> Episode | FailedEpisode:
        """Return the episode, or why there is none: a failed rollout is data, not a crash."""
        task = self._task(lease, sample)
        while True:
            try:
                episode = await self._environment.run(task, self._policy.fresh(task.task_id))
            except (EngineLostError, HandBackError, MemoryError):
                raise  # this process cannot go on: the lease is another actor's
            # Whatever an environment raises costs its own episode alone, also an exit that it asks for.
            except (Exception, SystemExit, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                    raise
                self._tell_of_failure(task, error)
                return _failed(error)
            if all(trajectory.oldest_version >= version for trajectory in episode.trajectories):
                return episode
            log.info("rolled_out_again", task=task.task_id, reason="a resumed learner's older weights came")
            try:
                lowered = await self._may_sample(lease, asks=True)
            except HandBackError:
                raise
            except SluiceError as error:
                return FailedEpisode("cancelled", str(error))
            if lowered is None:
                return FailedEpisode("cancelled", "its lease was settled meanwhile")
            version = lowered

    def _tell_of_failure(self, task: Task, error: BaseException) -> None:
        """Log a failed rollout, at most one a second.

        Raises `ConfigError` when rewards are never valid, or cost more than the run allows."""
        reason = f"{type(error).__name__}: {error}"
        if times := self._failures.due(time.monotonic()):
            log.warning(
                "rollout_failed",
                times=times,
                task=task.task_id,
                prompt=str(task.prompt)[:LOGGED_CHARACTERS],
                reason=reason[:LOGGED_CHARACTERS],
                exc_info=raised_by_environment(error),
            )
        if isinstance(error, BudgetSpentError):
            raise ConfigError(str(error))
        if not isinstance(error, InvalidRewardError):
            return  # a service that a reward asks may be away
        self._invalid_rewards += 1
        if self._invalid_rewards >= MOST_INVALID_REWARDS:
            raise ConfigError(f"{self._invalid_rewards} rewards in a row were none, the last: {error}")

    async def _may_sample(self, lease: Lease, *, asks: bool) -> int | None:
        """Wait for weights that may sample the lease: the oldest version that may, or None if it is settled.

        Weights that keep us waiting may be those of a learner that died: its successor needs the group
        before it gets there, and storage says so.
        """
        version = lease.policy_version
        while True:
            self._hand_back_at_the_end(lease)
            if asks:
                state = await self._state(lease)
                if state.state == "settled":
                    return None
                version = state.policy_version
            try:
                async with asyncio.timeout(WEIGHTS_PATIENCE_S):
                    await self._follower.at_least(version)
            except TimeoutError:
                asks = True
            else:
                return version

    def _hand_back_at_the_end(self, lease: Lease) -> None:
        """Raise `HandBackError` when this process is to end: what it waits for may take for ever."""
        if self._stop.is_set():
            raise HandBackError(f"lease {lease.lease_id} was not begun when this actor was stopped")

    async def _state(self, lease: Lease, *, attempt: bool = False) -> LeaseState:
        """Return where the lease stands. Raises `SchemaError` when its prompt is quarantined."""
        found = await self._ask(LeaseRequest(lease_id=lease.lease_id, attempt=attempt), lease)
        if found.state == "quarantined":
            raise SchemaError(f"lease {lease.lease_id}: quarantined, since its rollouts ended their actors")
        return found

    async def _ask(self, request: LeaseRequest, lease: Lease) -> LeaseState:
        """Ask storage about the lease; without an answer it is open, as its message says."""
        subject = self._bus.subject("rpc", "lease")
        try:
            return await self._bus.request(subject, request, LeaseState, timeout_s=ANSWER_TIMEOUT_S)
        except SluiceError as error:
            if times := self._unanswered.due(time.monotonic()):
                log.warning("lease_state_not_known", times=times, lease_id=lease.lease_id, reason=str(error))
            return LeaseState(state="open", policy_version=lease.policy_version)

    async def _stored(self, lease: Lease) -> GroupStatus:
        """Return what the shard has of the group. Without an answer all is rolled out: ids make that
        harmless."""
        subject = self._bus.subject("rpc", "group_status", shard_of(lease.lease_id, self._shards))
        request = GroupStatusRequest(lease_id=lease.lease_id)
        try:
            return await self._bus.request(subject, request, GroupStatus, timeout_s=ANSWER_TIMEOUT_S)
        except SluiceError as error:
            log.warning("siblings_not_known", lease_id=lease.lease_id, reason=str(error))
            return NOTHING

    async def _publish(self, group: Group) -> None:
        """Send what is finished and was not sent yet."""
        subject = self._bus.subject("trajectories", shard_of(group.lease.lease_id, self._shards))
        messages = group.unsent()
        await together(
            self._publisher.publish(subject, encode(batch), message_id=name) for name, batch in messages
        )
        sent = [trajectory for _, batch in messages for trajectory in batch.trajectories]
        self.counts["trajectories"] += len(sent)

    async def _on_unreadable(self, subject: str, _: str, error: SchemaError) -> None:
        """Refund a lease that nobody can read, or else it would be published again for ever."""
        number = subject.rpartition(".")[2]
        if number.isdecimal():  # older builds named no lease in the subject
            await self._reject(int(number), "set_aside", str(error))

    async def _reject(self, lease_id: int, reason: str, detail: str) -> None:
        event = GroupRejected(lease_id=lease_id, reason=reason, detail=detail, actor=self._name)
        subject = self._bus.subject("outcomes", "rejected")
        await self._publisher.publish(subject, encode(event), message_id=f"rejected-{lease_id}")
        self.counts["rejected"] += 1

    def _task(self, lease: Lease, sample: int) -> Task:
        prompt = lease.prompt
        return Task(
            task_id=f"{lease.group_id}.{sample}",
            prompt=prompt.content,
            label=prompt.label,
            metadata=prompt.metadata,
        )
