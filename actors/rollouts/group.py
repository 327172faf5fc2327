"""The siblings of one lease while an actor gathers them: stored by another, finished here, sent or not."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count
from typing import NamedTuple

from actors.episodes.episode import AgentTrajectory, Episode, FailedEpisode
from actors.episodes.sent_trajectories import PlacedPart, trajectories_of
from actors.policy.rollout_turns import SampledTurn
from actors.rewards.group_filters import EpisodeSize
from actors.rollouts.held_lease import HeldLease
from bus.agent_rewards import AgentReward
from bus.codec import decode, encode
from bus.errors import SchemaError
from bus.messages import Lease
from bus.policy_names import DEFAULT_POLICY
from bus.requests import GroupStatus
from bus.trajectory import TrajectoryBatch, joined_batches, refuse_impossible_logprobs

NOTHING = GroupStatus(group_size=0)
MANY_IMAGES_BYTES = 64 << 20
"""Bytes of images from which siblings are messages of their own, which repeat what they all show: storage
refuses a message above 512 MiB (bus/streams/message_parts.py)."""
KEPT_BYTES = 16 << 10
"""Size of an encoded episode up to which it is kept from its check until it is sent."""


class _Checked(NamedTuple):
    """An episode as the shard will read it."""

    data: bytes
    batch: TrajectoryBatch


class GroupMessage(NamedTuple):
    """What is sent of a group at once."""

    name: str
    batch: TrajectoryBatch
    data: bytes | None
    """The batch as it was encoded to be checked; None where it is to be encoded again."""


@dataclass
class Group:
    """Collects the episodes of a group. Where every episode gives equally many trajectories, `each`, a
    sample's place in the group is known before its siblings are finished, and finished ones may be sent
    ahead. Otherwise only the whole group is sent."""

    lease: Lease
    each: int | None
    actor: str
    version: int = 0
    """The oldest version of weights that may sample it; a resumed learner's is lower than before."""
    stored: GroupStatus = NOTHING
    """What another actor left in the shard."""
    episodes: dict[int, Episode] = field(default_factory=dict)
    failures: dict[int, FailedEpisode] = field(default_factory=dict)
    """Rollouts that failed here, by sample; their siblings go on without them."""
    sent: set[int] = field(default_factory=set)
    further: Mapping[str, HeldLease] = field(default_factory=dict)
    """Leases of further policies, by name: the group is one of each of them too."""
    left: dict[int, list[SampledTurn]] = field(default_factory=dict)
    """Turns that other actors left of rollouts which they did not end, by sample."""
    turns_kept_s: float = 0.0
    """When the group's turns were stored last, by the clock of the event loop."""
    _unsent_since: float | None = None
    _checked: dict[int, _Checked] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Rollouts of the whole group: as many as its first siblings said, whatever the lease says since."""
        if self.each is not None and self.stored.group_size:
            return self.stored.group_size // self.each
        return self.lease.samples

    @property
    def missing(self) -> list[int]:
        """Samples that are not stored."""
        if self.each is None:
            return list(range(self.samples))
        there, each = set(self.stored.samples), self.each
        return [n for n in range(self.samples) if not there.issuperset(range(n * each, (n + 1) * each))]

    @property
    def rewards(self) -> list[AgentReward]:
        """Return the rewards of all trajectories there are and that are trained: first those stored."""
        before = [reward for reward in self.stored.rewards if reward.rollout not in self.episodes]
        here = [
            AgentReward(part.policy, part.agent, rollout, part.reward)
            for _, rollout, part in self._parts(sorted(self.episodes))
            if part.is_trained
        ]
        return [*before, *here]

    @property
    def sizes(self) -> dict[tuple[str, str, int], EpisodeSize]:
        """Return how much each agent sampled in the episodes finished here, by policy, agent and rollout."""
        parts: dict[tuple[str, str, int], list[AgentTrajectory]] = {}
        for _, rollout, part in self._parts(sorted(self.episodes)):
            if part.is_trained:
                parts.setdefault((part.policy, part.agent, rollout), []).append(part)
        return {whose: _size(found) for whose, found in parts.items()}

    def part_of(self, policy: str, lease: Lease, belongs: Callable[[AgentTrajectory], bool]) -> "Group":
        """Return the trajectories that `belongs` chooses, as a group of a lease of the policy `policy`. An
        episode without any is left out; one that failed has failed for every policy."""
        of_this_prompt = replace(lease, prompt=self.lease.prompt)
        part = Group(of_this_prompt, None, self.actor, failures=dict(self.failures))
        for sample, episode in self.episodes.items():
            if sample in self.failures:
                part.episodes[sample] = self.failures[sample].as_episode(1, policy)
            elif chosen := tuple(filter(belongs, episode.trajectories)):
                part.episodes[sample] = replace(episode, trajectories=chosen)
        return part

    @property
    def by_policy(self) -> dict[str, "Group"]:
        """Return the group as one of each policy, by name: without further policies it is that of the run's
        own."""
        if not self.further:
            return {DEFAULT_POLICY: self}
        own = self.part_of(DEFAULT_POLICY, self.lease, lambda part: part.policy not in self.further)
        others = {
            name: self.part_of(name, held.lease, partial(_is_of, name)) for name, held in self.further.items()
        }
        return {DEFAULT_POLICY: own, **others}

    @property
    def unfailed(self) -> dict[int, Episode]:
        return {
            sample: self.episodes[sample] for sample in sorted(self.episodes.keys() - self.failures.keys())
        }

    @property
    def rewards_due(self) -> bool:
        """Return whether a trajectory there is, here or stored, lacks its reward."""
        here = (part.reward_due for episode in self.episodes.values() for part in episode.trajectories)
        return self.stored.rewards_due or any(here)

    @property
    def is_usable(self) -> bool:
        """Return whether enough episodes can be trained: a baseline wants two, unless the group is of one."""
        usable = {reward.rollout for reward in self.rewards}
        return len(usable) >= min(2, self.samples)

    @property
    def may_become_usable(self) -> bool:
        """Return whether episodes that still run can make the group usable; without failures it may be
        kept."""
        running = [sample for sample in self.missing if sample not in self.episodes]
        usable = {reward.rollout for reward in self.rewards}
        return not self.failures or len(usable) + len(running) >= min(2, self.samples)

    def add(self, sample: int, outcome: Episode | FailedEpisode) -> None:
        self._checked.pop(sample, None)
        if isinstance(outcome, Episode) and self.each not in (None, len(outcome.trajectories)):
            outcome = FailedEpisode(
                "environment_error",
                f"an episode of {len(outcome.trajectories)} trajectories, where the environment promises "
                f"{self.each}: set its trajectories_per_episode to None",
            )
        if isinstance(outcome, Episode) and (fault := self._fault(sample, outcome)):
            outcome = FailedEpisode("environment_error", fault)
        if isinstance(outcome, FailedEpisode):
            self.failures[sample] = outcome
            outcome = outcome.as_episode(self.each or 1)
        self.episodes[sample] = outcome
        self._unsent_since = self._unsent_since or asyncio.get_running_loop().time()

    def _fault(self, sample: int, episode: Episode) -> str | None:
        """Return why the shard would refuse the episode; None if it would not."""
        self.episodes[sample] = episode
        try:
            data = encode(self._batch([sample]))
            batch = decode(data, TrajectoryBatch)
            for trajectory in batch.trajectories:
                refuse_impossible_logprobs(trajectory)
        except SchemaError as error:
            return str(error)
        shows_images = any(trajectory.images for trajectory in batch.trajectories)
        if self.each is not None and len(data) <= KEPT_BYTES and not shows_images:
            self._checked[sample] = _Checked(data, batch)
        return None

    def rollout(self, sample: int) -> str:
        return f"{self.lease.group_id}.{sample}"

    def may_be_shared(self, share_after_s: float | None) -> bool:
        """Return whether finished rollouts may be sent without their siblings."""
        return share_after_s is not None and self.each is not None and not self.failures

    def keeps_turns_in_s(self, every_s: float | None) -> float | None:
        """Return the seconds until turns should be stored again; None for never."""
        if every_s is None:
            return None
        return max(0.0, self.turns_kept_s + every_s - asyncio.get_running_loop().time())

    def shared_in_s(self, share_after_s: float | None) -> float | None:
        """Return the seconds until what is finished should be sent without its siblings; None for never."""
        if share_after_s is None or not self.may_be_shared(share_after_s) or self._unsent_since is None:
            return None
        return max(0.0, self._unsent_since + share_after_s - asyncio.get_running_loop().time())

    def unsent(self) -> list[GroupMessage]:
        """Return what is finished and was not sent yet; from now on it counts as sent. The whole group is one
        message, and a part of it one a sample: each is the same whoever sends it. With routed experts or many
        images, which are large, each sample is one whose place is known."""
        samples = sorted(self.episodes.keys() - self.sent)
        whole = self.each is None or (len(samples) == self.samples and not self._is_large)
        self.sent.update(samples)
        self._unsent_since = None
        if whole:
            return [self._message(self.lease.group_id, samples)]
        return [self._message(self.rollout(sample), [sample]) for sample in samples]

    def _message(self, name: str, samples: list[int]) -> GroupMessage:
        """Return these episodes as a message, of the bytes that were checked where all of them are kept."""
        kept = [found for sample in samples if (found := self._checked.pop(sample, None)) is not None]
        if self.each is None or len(kept) < len(samples):
            return GroupMessage(name, self._batch(samples), None)
        trajectories = tuple(chain.from_iterable(one.batch.trajectories for one in kept))
        data = joined_batches([one.data for one in kept], each=self.each)
        return GroupMessage(name, TrajectoryBatch(trajectories=trajectories), data)

    @property
    def _is_large(self) -> bool:
        parts = [part for episode in self.episodes.values() for part in episode.trajectories]
        images = {image.digest: len(image.data) for part in parts for image in part.images}
        routed = any(part.routed_experts is not None for part in parts)
        return routed or sum(images.values()) > MANY_IMAGES_BYTES

    def _batch(self, samples: list[int]) -> TrajectoryBatch:
        parts = self._parts(samples)
        size = len(parts) if self.each is None else self.each * self.samples
        return TrajectoryBatch.of(trajectories_of(self.lease, parts, size=size, actor=self.actor))

    def _parts(self, samples: list[int]) -> list[PlacedPart]:
        parts = [(sample, part) for sample in samples for part in self.episodes[sample].trajectories]
        places = chain.from_iterable(map(self._places, samples)) if self.each else count()
        return [PlacedPart(place, sample, part) for place, (sample, part) in zip(places, parts, strict=False)]

    def _places(self, sample: int) -> range:
        each = self.each or 1
        return range(sample * each, (sample + 1) * each)


def _is_of(policy: str, part: AgentTrajectory) -> bool:
    return part.policy == policy


def _size(parts: Sequence[AgentTrajectory]) -> EpisodeSize:
    return EpisodeSize(
        tokens=sum(turn.stop - turn.start for part in parts for turn in part.turns),
        truncated=any(part.end in ("length", "turn_limit") for part in parts),
    )
