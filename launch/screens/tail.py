"""`launch tail`: shows trajectories of a run, and follows them as their groups become complete.

It takes nothing from the run. The stores are read where they are in the run's directory, and shards are asked
for one group at a time elsewhere: the stream of trajectories is a work queue, on which a second reader would
take them away."""

import asyncio
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from bus.codec import Json
from bus.errors import BusError
from bus.trajectory import TRUSTED_ENDS, Trajectory
from bus.waiting import set_within
from launch.screens.completion_table import number, reward_parts
from launch.trajectories.facts import RATIOS, facts_of, spans
from launch.trajectories.search import AT_ONCE, Search, TrajectoryFilter, newest, opened
from launch.trajectories.sources import TrajectorySource
from launch.trajectories.token_texts import Decode
from launch.trajectories.training import GroupTraining

POLL_S = 1.0
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class TailOptions:
    """What to show of the run."""

    recent: int
    once: bool = False
    wanted: TrajectoryFilter = field(default_factory=TrajectoryFilter)
    token_ids: bool = False


async def tail_run(
    source: TrajectorySource,
    options: TailOptions,
    show: Callable[[dict[str, Json]], None],
    stop: asyncio.Event,
) -> None:
    """Call `show` with each trajectory as an object, until `stop`, or until the run is over. Raises
    `ConfigError` where they cannot be read, and for filters of what is not known."""
    async with opened(source, options.wanted) as search:
        tail = _Tail(source, search, options, show)
        seen = await tail.recent()
        while not (options.once or stop.is_set()):
            is_over = await source.is_over()  # asked before what is new: nothing comes after the end
            await tail.new(seen, stop)
            if is_over:
                return
            await set_within(stop, POLL_S)


class _Tail:
    def __init__(
        self, source: TrajectorySource, search: Search, options: TailOptions,
        show: Callable[[dict[str, Json]], None],
    ) -> None:  # fmt: skip
        self._source = source
        self._search = search
        self._options = options
        self._show = show
        self._problem = ""
        self._left_out = ""

    async def recent(self) -> set[int]:
        """Show the newest trajectories, oldest first; return the leases of all groups that were complete."""
        seen = {*await self._search.leases()}
        if self._options.recent:
            found = await newest(self._search, self._options.recent)
            shown = sorted(found.trajectories, key=lambda t: (t.lease_id, t.sample))[-self._options.recent :]
            await self._show_all(shown)
            self._say_left_out()
            is_cut = len(shown) < len(found.trajectories)  # then the next page begins with that group
            below = shown[0].lease_id + 1 if is_cut else found.below
            if self._options.once and not shown:
                _say(f"none of {found.searched} groups has such a trajectory")
            elif self._options.once and below is not None:
                _say(f"older trajectories may follow: --below {below}")
        return seen

    async def new(self, seen: set[int], stop: asyncio.Event) -> None:
        """Show the trajectories that became complete since, and add them to what was `seen`."""
        try:
            leases = [lease for lease in await self._search.leases() if lease not in seen]
            for first in range(0, len(leases), AT_ONCE):
                part = leases[first : first + AT_ONCE]
                await self._show_all([t for group in await self._search.read(part) for t in group])
                self._say_left_out()
                seen.update(part)
                if stop.is_set():
                    return
        except BusError as error:
            if not self._problem:
                _say(f"the run does not answer ({error}): its trajectories are shown when it does")
            self._problem = str(error)
        else:
            self._problem = ""

    def _say_left_out(self) -> None:
        if self._left_out != self._search.left_out:
            self._left_out = self._search.left_out
            _say(self._left_out)

    async def _show_all(self, trajectories: Sequence[Trajectory]) -> None:
        if not trajectories:
            return
        training = await self._source.training({t.lease_id for t in trajectories})
        version = await self._source.newest_version()
        for lease, group in groupby(trajectories, key=lambda t: t.lease_id):
            for t in group:
                one = describe(
                    t, self._search.decode, version, training[lease], token_ids=self._options.token_ids
                )
                self._show(one)


def _say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)  # noqa: T201 - the user's terminal


def describe(
    t: Trajectory, decode: Decode, newest_version: int, training: GroupTraining, *, token_ids: bool
) -> dict[str, Json]:
    """Return a trajectory as an object whose keys docs/operations.md describes; its staleness is counted from
    `newest_version`."""
    facts = facts_of(t, training)
    oldest = facts["oldest_version"]
    found: dict[str, Json] = {
        **facts,
        "steps": {str(step): weight for step, weight in training.weights.items()},
        "staleness": max(0, newest_version - oldest) if isinstance(oldest, int) else None,
        "parts": [_part(t, decode, *span) for span in spans(t)],
    }
    if token_ids:
        found["token_ids"] = t.token_ids.tolist()
        found["loss_mask"] = t.loss_mask.tolist()
    return found


def _part(t: Trajectory, decode: Decode, start: int, stop: int, number: int | None) -> dict[str, Json]:
    """Return the text of a part. What the policy did not sample has its roles in the chat template's
    tokens."""
    versions = t.policy_versions[start:stop]
    sampled = versions[versions >= 0]
    turn = None if number is None else t.turns[number]
    return {
        "by": "context" if turn is None else "policy",
        "start": start,
        "stop": stop,
        "text": decode(t.token_ids[start:stop].tolist()),
        "masked_tokens": int(t.loss_mask[start:stop].sum()),
        "versions": [int(sampled.min()), int(sampled.max())] if len(sampled) else None,
        "finish_reason": None if turn is None else turn.finish_reason,
        "reward": None if turn is None else turn.reward,
    }


def lines(found: dict[str, Json]) -> str:
    """Return the object of `describe` as lines for a terminal, without the text's control characters."""
    due = "reward due" if found["end"] in TRUSTED_ENDS else "no reward"
    reward = due if found["reward"] is None else f"reward {found['reward']:g}"
    by = f"{found['agent']} on {found['actor']}" if found["actor"] else found["agent"]
    stale = "" if found["staleness"] is None else f", staleness {found['staleness']}"
    parts = [(f"part {name}", value) for name, value in reward_parts(found)]
    known = [(name.replace("_", " "), found[name]) for name in ("label", "advantage", *RATIOS)]
    facts = [f"{name} {number(value)}" for name, value in [*known, *parts] if value is not None]
    shown = [
        f"=== {found['trajectory_id']} by {by}: {reward}, {found['end']}, "
        f"{_versions(found['oldest_version'], found['newest_version'])}{stale}",
        _visible("; ".join([str(found["training"]), *facts])),
    ]
    texts = found["parts"]
    for part in texts if isinstance(texts, list) else ():
        assert isinstance(part, dict)
        shown += [f"--- {_heading(part)}", _visible(str(part["text"]))]
    return "\n".join(shown)


def _visible(text: str) -> str:
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def _heading(part: dict[str, Json]) -> str:
    span = f"tokens {part['start']} to {part['stop']}"
    if part["by"] == "context":
        return f"context, {span}, not trained"
    versions = part["versions"]
    said = _versions(*versions) if isinstance(versions, list) else "no version"
    reward = "" if part["reward"] is None else f", reward {part['reward']:g}"
    return f"policy, {span}, {part['masked_tokens']} in the mask, {said}, {part['finish_reason']}{reward}"


def _versions(oldest: Json, newest: Json) -> str:
    if oldest is None:
        return "nothing to train on"
    return f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"
