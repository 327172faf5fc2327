"""The worker of an actor: it takes prompt leases, rolls them out and publishes the groups."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import structlog

from actors.environments.base import Environment, RunsOnDemand, ScoresGroups
from actors.environments.failures import EnvironmentFailures, end_after
from actors.environments.sample_calls import FirstCalls
from actors.episodes.episode import Episode, FailedEpisode
from actors.episodes.errors import EpisodeError, raised_by_environment
from actors.episodes.task import Task
from actors.metrics.episode_metrics import EpisodeEnds, EpisodeMetrics, sampled_counts
from actors.policy.policy import Policy
from actors.rewards.group_filters import DropReason, GroupFilter, reason_to_drop
from actors.rollouts.account import ActorAccount
from actors.rollouts.further_leases import FurtherLeases, held_leases
from actors.rollouts.group import Group
from actors.rollouts.interruption import Interruption
from actors.rollouts.lease_admission import LeaseAdmission, LeaseRoom
from actors.rollouts.leases import PolicyLeases
from actors.rollouts.participation import Participation
from actors.settings.groups import InterruptionConfig, RetriesConfig
from actors.weights.follow import PolicyFollower
from bus.actor_counters import SampledCounts
from bus.codec import Json
from bus.connection import Bus
from bus.errors import EngineLostError, HandBackError, SluiceError
from bus.messages import Lease
from bus.policy_names import DEFAULT_POLICY
from bus.process.log_throttle import LogThrottle
from bus.process.plugins import RAISED
from bus.requests import LeaseRequest
from bus.streams.consume import Inbox, consume_received
from bus.streams.message_parts import Parts
from bus.streams.received import Received
from bus.trajectory import TRUSTED_ENDS
from bus.waiting import cancelled, is_cancelled
from storage.dispatch.lease_status import FREE_DELIVERIES, is_suspect
from storage.metrics.spans import span

log = structlog.get_logger()
Rollout = asyncio.Task[Episode | FailedEpisode]
FAILED_LOG_PERIOD_S = 1.0
LOGGED_CHARACTERS = 1000
NOBODY_IS_OWN = (
    "the run trains it and would take no step: leave at least one agent of the environments to it, out of "
    "all policies.NAME.agents, and have the environment ask it with trainable=True"
)


def _failed(error: BaseException) -> FailedEpisode:
    return FailedEpisode(end_after(error), f"{type(error).__name__}: {error}")


@dataclass(frozen=True, kw_only=True)
class WorkerParts:
    """How a worker works. The defaults are for a run of one policy of which nobody keeps an account."""

    account: Path | None = None
    """Directory of the account of what is published of the run's own policy."""
    retries: RetriesConfig = field(default_factory=RetriesConfig)
    """How often a failed rollout is repeated before it counts as failed."""
    first_calls: FirstCalls | None = None
    """Calls the rewards before their first rollouts, where the start of the run did not."""
    failures: EnvironmentFailures | None = None
    """Counts failures by environment, and ends the run; None has the limits of the settings' defaults."""
    interruption: InterruptionConfig = field(default_factory=InterruptionConfig)
    """How long rollouts may go on after a stop, and how often their turns are kept."""
    share_after_s: float | None = None
    """Time after which finished rollouts are given to others; None keeps them here."""
    further: Mapping[str, FurtherLeases] = field(default_factory=dict)
    """Leases of the further policies that the run trains, by name: each group takes one of each."""
    admission: LeaseAdmission | None = None
    """Bounds leases by the engines' free KV tokens; without it only their number does."""


class Worker:
    """Takes leases, rolls each prompt out, and publishes the group or rejects it."""

    def __init__(
        self, bus: Bus, policy: Policy, environment: Environment, parts: WorkerParts | None = None, *,
        follower: PolicyFollower, keep: GroupFilter, shards: int, name: str,
    ) -> None:  # fmt: skip
        parts = parts or WorkerParts()
        self.counts = policy.turns.counts
        self.ends = EpisodeEnds()
        self.failures = parts.failures or EnvironmentFailures(environment)
        self.episode_metrics = EpisodeMetrics()
        self.sampled = SampledCounts()
        """Counts of all trajectories that were sampled here, whatever became of them."""
        self.parts = parts
        self.room = LeaseRoom(environment, policy.contexts, parts.admission)
        """Bounds the leases that are taken."""
        self._bus = bus
        account = ActorAccount(parts.account, name)
        self._leases = PolicyLeases(
            bus, follower, shards=shards, actor=name, counts=self.counts, account=account
        )
        self.interruption = Interruption(
            self._leases, policy.turns, parts.interruption, actor=name, share_after_s=parts.share_after_s
        )
        """Keeps the turns of rollouts that are not ended here."""
        self._policy = policy
        self._environment = environment
        self._keep = keep
        self._name = name
        self._participation = Participation(DEFAULT_POLICY, NOBODY_IS_OWN)
        self._failure_log = LogThrottle(FAILED_LOG_PERIOD_S)
        self._suspect = asyncio.Lock()
        """Held for a lease that may have killed its actors: so a death accuses one prompt, not all."""
        self._stop = asyncio.Event()
        self.rollouts_running = 0

    @property
    def status(self) -> dict[str, Json]:
        return {**self.counts, **self.ends.status, "rollouts_running": self.rollouts_running}

    async def run(self, stop: asyncio.Event, *, groups_at_once: int) -> None:
        """Work until `stop`, then finish what was begun and soon ends, and hand back the rest."""
        self._stop = self._leases.stop = stop
        parts = Parts(self._bus, on_unreadable=self._leases.on_unreadable)
        inbox = Inbox(self._bus, "TASKS", "rollout", parts)
        if isinstance(self._environment, RunsOnDemand):
            await self._environment.open(stop)
        interrupting = asyncio.create_task(self.interruption.run(stop), name="interrupt")
        try:
            await consume_received(
                inbox,
                self._bus,
                Lease,
                self._on_lease,
                stop=stop,
                concurrency=groups_at_once,
                room=self.room.within,
            )
        finally:
            await cancelled(interrupting)
            await self.interruption.handed_on()
            self._leases.account.close()

    async def _on_lease(self, received: Received[Lease]) -> None:
        """The lease is acked when this returns: its group is on the stream, or its rejection is. Raises
        `SchemaError` for a prompt that is quarantined: it is set aside."""
        lease = received.message
        self.room.not_begun.add(lease.lease_id)
        try:
            if received.deliveries <= FREE_DELIVERIES:
                await self._roll_out(lease, again=lease.republished)
            elif not is_suspect((await self._leases.state(lease)).attempts):
                await self._attempt(lease)
            else:
                async with self._suspect:
                    self._leases.hand_back_at_the_end(lease)
                    await self._attempt(lease)
        finally:
            self.room.not_begun.discard(lease.lease_id)

    async def _attempt(self, lease: Lease) -> None:
        """Roll out a lease that came back. The attempt accuses it unless it is seen to end otherwise."""
        try:
            await self._roll_out(lease, again=True, counted=True)
        except (HandBackError, asyncio.CancelledError):  # the actor is stopped, or another lease ended it
            await self._leases.ask(LeaseRequest(lease_id=lease.lease_id, excused=True), lease)
            raise

    async def _roll_out(self, lease: Lease, *, again: bool, counted: bool = False) -> None:
        if self.parts.first_calls is not None:
            await self.parts.first_calls.of(lease.prompt)
        async with AsyncExitStack() as stack:
            further = await held_leases(self.parts.further, stack)
            version = await self._leases.may_sample(lease, asks=again)
            if version is None or (
                counted and (await self._leases.state(lease, attempt=True)).state == "settled"
            ):
                self.counts["settled"] += 1
                return
            each = None if self.parts.further else self._environment.trajectories_per_episode
            group = Group(lease, each, self._name, version, further=further)
            if again:
                await self.interruption.take_over(group)
            await self._gather(group)
            await self._score(group)
            self._count(group)
            await self._hand_over(group)

    async def _hand_over(self, group: Group) -> None:
        """Publish what each policy is trained on, or reject its lease. A further policy that took no part
        keeps its lease for another group."""
        for policy, part in group.by_policy.items():
            held = group.further.get(policy)
            if held is None:
                self._note_participation(part)
                await self._settle(self._leases, part)
            elif self.parts.further[policy].takes_part(part):
                await self._settle(held.leases, part)
                held.is_settled = True

    def _note_participation(self, own: Group) -> None:
        """Raise `ConfigError` for a run whose own policy never has a trajectory to train on."""
        trained = any(part.trainable for one in own.unfailed.values() for part in one.trajectories)
        played = trained or bool(own.stored.samples)
        self._participation.note(took_part=played or bool(own.failures), has_played=played)

    async def _settle(self, leases: PolicyLeases, group: Group) -> None:
        lease_id = group.lease.lease_id
        if not group.episodes:
            await leases.reject(lease_id, "took_no_part", "no agent of the group was this policy")
        elif group.failures and not group.is_usable:
            await leases.reject(lease_id, "rollout_failed", group.failures[min(group.failures)].reason)
        elif reason := self._reason_to_drop(group):
            rewards = tuple(reward.reward for reward in group.rewards)
            await leases.reject(lease_id, reason.name, reason.detail, rewards)
        else:
            await leases.publish(group)
            leases.counts["groups"] += 1

    def _reason_to_drop(self, group: Group) -> DropReason | None:
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
        except (*RAISED, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            task = self._task(group.lease, min(episodes))
            self._tell_of_failure(task, error, worked_before=len(episodes))
            scored = dict.fromkeys(episodes, _failed(error))
        for sample, outcome in scored.items():
            if outcome is not episodes[sample]:
                group.add(sample, outcome)

    def _count(self, group: Group) -> None:
        """Count how the episodes ended that were rolled out here."""
        self.counts["failed_episodes"] += len(group.failures)
        self.ends.add(episode.end for episode in group.episodes.values())
        self.episode_metrics.add(group.episodes.values())
        parts = (part for episode in group.episodes.values() for part in episode.trajectories)
        self.sampled = self.sampled.plus(sampled_counts(parts))
        self.failures.count(group.lease.prompt.metadata, group.episodes)

    async def _gather(self, group: Group) -> None:
        """Roll out what is missing, and send what is finished ahead of siblings that take long. Raises
        `HandBackError`, plain, when one of them is to be done elsewhere."""
        lease, rollouts = group.lease, [group.rollout(sample) for sample in group.missing]
        self._policy.contexts.begin(lease.lease_id, rollouts)
        try:
            await self._gather_all(group)
        except asyncio.CancelledError:
            if self.interruption.engines_are_lost:  # as another lease found: what this one has is kept too
                self.interruption.hand_on(group)
            raise
        except ExceptionGroup as errors:
            self.interruption.engines_are_lost |= errors.subgroup(EngineLostError) is not None
            if errors.subgroup((HandBackError, EngineLostError)):
                handing_on = self.interruption.hand_on(group)
                await asyncio.wait([handing_on])  # unlike `await`, it leaves the task alone when cancelled
                handing_on.result()
            handed_back, others = errors.split(HandBackError)
            if handed_back is None or others is not None:
                raise
            raise handed_back.exceptions[0] from None
        finally:
            self._policy.contexts.end(lease.lease_id)
            self._policy.turns.end(rollouts)

    async def _gather_all(self, group: Group) -> None:
        async with asyncio.TaskGroup() as tasks:
            running = {tasks.create_task(self._episode(group, sample)): sample for sample in group.missing}
            await asyncio.sleep(0)  # then all episodes have begun, and clients see them
            self.room.not_begun.discard(group.lease.lease_id)
            interrupted = tasks.create_task(self.interruption.event.wait())
            try:
                await self._collect(group, running, interrupted)
            finally:
                interrupted.cancel()

    async def _collect(
        self, group: Group, running: dict[Rollout, int], interrupted: "asyncio.Task[bool]"
    ) -> None:
        """Add what ends to the group, and store what others should not have to do again meanwhile."""
        group.turns_kept_s = asyncio.get_running_loop().time()
        while running:
            ends = {*running, interrupted}
            done, _ = await asyncio.wait(
                ends, timeout=self._patience_s(group), return_when=asyncio.FIRST_COMPLETED
            )
            for task in [task for task in running if task in done]:
                group.add(running.pop(task), task.result())
            if not group.may_become_usable:
                for task in running:
                    task.cancel()
                return
            if running and interrupted in done:
                await self.interruption.interrupt(group, running.values())
            if running and group.shared_in_s(self.parts.share_after_s) == 0:
                await self._leases.publish(group)
            if running:
                await self.interruption.keep_when_due(group)

    def _patience_s(self, group: Group) -> float | None:
        """Return the seconds until something of the group should be stored; None for never."""
        times = group.shared_in_s(self.parts.share_after_s), group.keeps_turns_in_s(self.interruption.every_s)
        return min((time_s for time_s in times if time_s is not None), default=None)

    async def _episode(self, group: Group, sample: int) -> Episode | FailedEpisode:
        """Return the episode, or why there is none. A failed rollout is repeated as the settings say."""
        task = self._task(group.lease, sample)
        for repeated in count():
            outcome = await self._rollout(group, task)
            trusted = outcome.end in TRUSTED_ENDS
            if trusted or repeated >= self.parts.retries.of(outcome.end) or self._stop.is_set():
                self._policy.contexts.ended(task.task_id)
                if trusted:
                    self.failures.worked(task, outcome.fault if isinstance(outcome, Episode) else "")
                return outcome
            self.counts["repeated_episodes"] += 1
        raise AssertionError("count() does not end")

    async def _rollout(self, group: Group, task: Task) -> Episode | FailedEpisode:
        """Return the episode, or why there is none: a failed rollout is data, not a crash."""
        lease, frozen = group.lease, self.parts.further.keys() - group.further.keys()
        while True:
            self._policy.turns.begin(task.task_id, group.left.pop(task.sample, ()))
            self.rollouts_running += 1
            try:
                with span("rollout", task=task.task_id) as note:
                    policy = self._policy.fresh(task.task_id, lease_version=lease.policy_version)
                    episode = await self._environment.run(task, policy)
                    note("end", episode.end)
            except (EngineLostError, HandBackError, MemoryError):
                raise  # this process cannot go on: the lease is another actor's
            # Whatever an environment raises costs its own episode alone, also an exit that it asks for.
            except (*RAISED, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and is_cancelled():
                    raise
                self._tell_of_failure(task, error)
                return _failed(error)
            finally:
                self.rollouts_running -= 1
            episode = episode.with_frozen(frozen)
            if episode.end not in TRUSTED_ENDS:
                self.failures.failed(task, EpisodeError(f"it ended as {episode.end}"), episode.end)
            oldest = {name: held.version for name, held in group.further.items()}
            if all(t.oldest_version >= oldest.get(t.policy, group.version) for t in episode.trajectories):
                return episode
            log.info("rolled_out_again", task=task.task_id, reason="a resumed learner's older weights came")
            try:
                lowered = await self._leases.may_sample(lease, asks=True)
                still_open = [await held.is_still_open() for held in group.further.values()]
            except HandBackError:
                raise
            except SluiceError as error:
                return FailedEpisode("cancelled", str(error))
            if lowered is None or not all(still_open):
                return FailedEpisode("cancelled", "its lease was settled meanwhile")
            group.version = lowered

    def _tell_of_failure(self, task: Task, error: BaseException, *, worked_before: int = 0) -> None:
        """Log a failed rollout, at most one a second. Raises `ConfigError` when failures end the run."""
        reason = f"{type(error).__name__}: {error}"
        if times := self._failure_log.due(time.monotonic()):
            log.warning(
                "rollout_failed",
                times=times,
                task=task.task_id,
                prompt=str(task.prompt)[:LOGGED_CHARACTERS],
                reason=reason[:LOGGED_CHARACTERS],
                exc_info=raised_by_environment(error),
            )
        self.failures.failed(task, error, end_after(error), worked_before=worked_before)

    def _task(self, lease: Lease, sample: int) -> Task:
        return Task.of(lease.prompt, f"{lease.group_id}.{sample}", sample=sample)
