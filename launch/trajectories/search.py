"""The search over the trajectories of a run, for the page, the terminal and the export."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf, isnan
from typing import get_args

from bus.codec import Json
from bus.errors import ConfigError
from bus.messages import parse_trajectory_name
from bus.trajectory import SOURCE, TASK_KEYS, TRUSTED_ENDS, End, Trajectory
from launch.trajectories.sources import Groups, TrajectorySource
from launch.trajectories.token_texts import Decode

AT_ONCE = 4
"""Groups that are read at a time."""
DATA_SET = "data_set"
"""Entry of the metadata of an answer to a held-out prompt: the name of its data set."""
LARGEST_NUMBER = 2**53
"""Largest step, version or lease that may be asked for: a browser knows whole numbers up to there."""


@dataclass(frozen=True)
class TrajectoryFilter:
    """Which trajectories are wanted; None wants any. Raises `ConfigError` for what can choose nothing."""

    step: int | None = None
    version: int | None = None
    """Version that sampled some token of the trajectory."""
    least_reward: float | None = None
    most_reward: float | None = None
    least_ratio: float | None = None
    """Least importance ratio of the trajectory, as the mean over its trained tokens."""
    most_ratio: float | None = None
    end: str | None = None
    source: str | None = None
    task: str | None = None
    """Name of its task, as the metadata of its prompt has it."""
    data_set: str | None = None
    lease: int | None = None
    recorded: bool = False
    """Whether a trajectory must have a known importance ratio for each token."""
    text: str | None = None
    """Text that the trajectory has somewhere, in capitals or not."""
    below: int | None = None
    """Lease below which to search, for the next page."""

    def __post_init__(self) -> None:
        for name in ("step", "version", "lease", "below"):
            if not 0 <= (number := getattr(self, name) or 0) <= LARGEST_NUMBER:
                raise ConfigError(f"{name}={number}: it is a whole number from 0 to {LARGEST_NUMBER}")
        for name in ("least_reward", "most_reward", "least_ratio", "most_ratio"):
            if isnan(getattr(self, name) or 0.0):
                raise ConfigError(f"{name}=nan: it is a number, which others are compared with")
        if self.end is not None and self.end not in get_args(End):
            raise ConfigError(f"no trajectory ends as {self.end!r}: it is one of {', '.join(get_args(End))}")

    @property
    def is_of_ratios(self) -> bool:
        return self.least_ratio is not None or self.most_ratio is not None

    def matches_ratio(self, ratio: float | None) -> bool:
        """Return whether a mean importance ratio is wanted; one that is not known is not."""
        least, most = self.least_ratio, self.most_ratio
        return ratio is not None and (least is None or ratio >= least) and (most is None or ratio <= most)

    def matches(self, t: Trajectory) -> bool:
        """Return whether the trajectory is wanted, apart from what its group, its steps and its text
        decide."""
        metadata, reward = t.metadata, known_reward(t)
        tasks = (str(metadata[key]) for key in TASK_KEYS if metadata.get(key) is not None)
        return (
            (self.version is None or self.version in t.policy_versions)
            and self.end in (None, t.end)
            and self.source in (None, metadata.get(SOURCE))
            and self.data_set in (None, metadata.get(DATA_SET))
            and (self.task is None or self.task in tasks)
            and (self.least_reward is None or (reward is not None and reward >= self.least_reward))
            and (self.most_reward is None or (reward is not None and reward <= self.most_reward))
        )


class Search:
    """One question about the groups of a run, which are open meanwhile."""

    def __init__(
        self, source: TrajectorySource, groups: Groups, decode: Decode, wanted: TrajectoryFilter
    ) -> None:
        self.decode = decode
        self.complete = 0
        """Number of complete groups, when `leases` was asked last."""
        self._source = source
        self._groups = groups
        self._wanted = wanted
        self._recorded: set[str] | None = None

    @property
    def left_out(self) -> str:
        """Say of how many groups that were to be read nothing could be, and why; empty without any."""
        return told_left_out(self._groups.left_out)

    async def leases(self) -> list[int]:
        """Return the leases of the groups that are complete by now and may have what is wanted, ascending.
        Raises `ConfigError` where the steps or records of the filter are not known."""
        found, wanted = await self._groups.leases(), self._wanted
        self.complete = len(found)
        if wanted.lease is not None:
            found = [lease for lease in found if lease == wanted.lease]
        if wanted.step is not None:
            found = sorted({*found}.intersection(await self._source.of_step(wanted.step)))
        if wanted.recorded:
            self._recorded = await self._source.recorded()
            found = sorted({*found}.intersection(parse_trajectory_name(name)[0] for name in self._recorded))
        return [lease for lease in found if wanted.below is None or lease < wanted.below]

    async def read(self, leases: Sequence[int]) -> list[list[Trajectory]]:
        read = await self._groups.read(leases)
        groups = [[t for t in group if self._is_wanted(t)] for group in read]
        if self._wanted.is_of_ratios:
            groups = await self._with_ratios(groups)
        if self._wanted.text is not None:
            groups = await asyncio.to_thread(self._with_text, groups, self._wanted.text.casefold())
        return [group for group in groups if group]

    def _is_wanted(self, t: Trajectory) -> bool:
        return self._wanted.matches(t) and (self._recorded is None or t.trajectory_id in self._recorded)

    async def _with_ratios(self, groups: Sequence[Sequence[Trajectory]]) -> list[list[Trajectory]]:
        """Return trajectories with a wanted importance ratio. Raises `ConfigError` where none is known."""
        training = await self._source.training({t.lease_id for group in groups for t in group})
        if any(one.use is None for one in training.values()):
            raise ConfigError(
                "importance ratios are known of trained trajectories, where the learner's files are: leave "
                "them out"
            )
        known = ((t, training[t.lease_id].importance_ratios(t)) for group in groups for t in group)
        wanted = {t.trajectory_id for t, found in known if self._wanted.matches_ratio(found and found.mean)}
        return [[t for t in group if t.trajectory_id in wanted] for group in groups]

    def _with_text(self, groups: Sequence[Sequence[Trajectory]], text: str) -> list[list[Trajectory]]:
        """Return trajectories that have `text`, which is casefolded, in any part."""
        return [
            [t for t in group if text in self.decode(t.token_ids.tolist()).casefold()] for group in groups
        ]


@asynccontextmanager
async def opened(source: TrajectorySource, wanted: TrajectoryFilter) -> AsyncIterator[Search]:
    """Open the groups of a run for a search. Raises `ConfigError` where none can be read."""
    async with source.groups() as groups:
        yield Search(source, groups, await source.decode(), wanted)


@dataclass(frozen=True)
class Found:
    """What a search has found, the newest groups first."""

    trajectories: list[Trajectory]
    searched: int
    below: int | None
    """Lease below which the search goes on; None at its end."""


async def newest(search: Search, most: int, *, groups: int | None = None, seconds: float = inf) -> Found:
    """Return the newest `most` trajectories that are wanted, and the rest of the last one's group. The search
    ends before that after so many groups or seconds: the reader decides whether it goes on."""
    leases = (await search.leases())[::-1]
    until_s = time.monotonic() + seconds
    found: list[Trajectory] = []
    searched = 0
    while searched < min(len(leases), groups or len(leases)) and len(found) < most:
        if searched and time.monotonic() > until_s:
            break
        part = leases[searched : searched + AT_ONCE]
        searched += len(part)
        for group in await search.read(part):
            if len(found) >= most:
                searched = leases.index(group[0].lease_id)
                break
            found += group
    more = leases[searched - 1] if searched and searched < len(leases) else None
    return Found(found, searched, more)


def told_left_out(left_out: Mapping[int, str]) -> str:
    """Say how many groups are left out and why the first is; empty without any."""
    if not left_out:
        return ""
    lease, reason = next(iter(left_out.items()))
    many = "1 group is" if len(left_out) == 1 else f"{len(left_out)} groups are"
    return f"{many} left out, first that of lease {lease}: {reason}"


def known_reward(t: Trajectory) -> float | None:
    """Return the reward; None while it is due, and where a failure of what surrounds the policy left none."""
    return None if t.reward_due or t.end not in TRUSTED_ENDS else t.reward


def prompt_text(t: Trajectory, decode: Decode) -> str:
    """Return the text before the first turn."""
    return decode(t.token_ids[: t.turns[0].start if t.turns else len(t.token_ids)].tolist())


def answer_text(t: Trajectory, decode: Decode) -> str:
    """Return the text from the first turn to the end of the last one, with what came between."""
    return decode(t.token_ids[t.turns[0].start : t.turns[-1].stop].tolist()) if t.turns else ""


def sampled_versions(t: Trajectory) -> Json:
    """Return the oldest and the newest version that sampled a token; None without any."""
    versions = t.policy_versions[t.policy_versions >= 0]
    return [int(versions.min()), int(versions.max())] if len(versions) else None
