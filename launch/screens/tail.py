"""`launch tail`: shows trajectories of a live run as their groups become complete. It takes nothing from it.

Shards list the groups that they completed, and are asked for one group at a time, as a learner elsewhere
would: the stream of trajectories is a work queue, on which a second reader would take them away.
"""

import asyncio
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from actors.weights.follow import fetch_model_files
from bus.codec import Json
from bus.connection.bus import Bus
from bus.errors import BusError, ConfigError, UnreadableGroupsError
from bus.messages import PolicyManifest
from bus.requests import ReadRequest, StoredGroups, StoredRequest
from bus.topology import shard_of
from bus.trajectory import Trajectory, TrajectoryBatch
from bus.waiting import is_away, set_within
from launch.process.run_connection import joined
from launch.run_view.trajectory_spans import spans
from launch.settings.run_config import RunConfig

log = structlog.get_logger()
POLL_S = 1.0
ANSWER_TIMEOUT_S = 10.0
"""Longest time between two parts of an answer."""
NOTHING_AFTER = 1 << 40
"""A shard that is asked for its groups from this one on answers with none, and how many there are."""
SEARCHED = 256
"""Most groups of each shard that are searched for recent trajectories of one task."""
TASK_KEYS = ("id", "task_id")
"""Keys of a prompt's metadata by which `--task` finds its trajectories."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class TailOptions:
    """What to show of the run."""

    recent: int
    """Trajectories to show first."""
    once: bool = False
    """Says whether to end after those."""
    lease: int | None = None
    task: str | None = None
    token_ids: bool = False

    def matches(self, trajectory: Trajectory) -> bool:
        """Return whether the trajectory is one of the task, if one is named."""
        names = (trajectory.metadata.get(key) for key in TASK_KEYS)
        return self.task is None or self.task in (str(name) for name in names if name is not None)


async def tail_run(
    where: RunConfig, wanted: TailOptions, show: Callable[[dict[str, Json]], None], stop: asyncio.Event
) -> None:
    """Call `show` with each trajectory as an object, until `stop`. Raises `ConfigError` without a policy."""
    async with Bus.connect(where.bus, where.run, name="tail", stop=stop) as bus:
        if (config := await joined(bus, where, {}, stop)) is None:
            return
        async with _tokenizer(bus) as tokenizer:
            await _Tail(bus, config.replay.shards, tokenizer, wanted, show).run(stop)


@asynccontextmanager
async def _tokenizer(bus: Bus) -> AsyncIterator[PreTrainedTokenizerBase]:
    """Load the tokenizer that the newest policy names."""
    found = await bus.get("policy", PolicyManifest)
    if found is None:
        raise ConfigError(f"run {bus.topology.run!r} has no policy yet: start its learner, then try again")
    with tempfile.TemporaryDirectory(prefix="sluice-tokenizer-") as directory:
        await fetch_model_files(bus, found[0].model, Path(directory))
        yield await asyncio.to_thread(AutoTokenizer.from_pretrained, directory)


class _Tail:
    """Asks the shards for what is new, and shows it."""

    def __init__(
        self, bus: Bus, shards: int, tokenizer: PreTrainedTokenizerBase, wanted: TailOptions,
        show: Callable[[dict[str, Json]], None],
    ) -> None:  # fmt: skip
        self._bus = bus
        self._shards = shards
        self._tokenizer = tokenizer
        self._wanted = wanted
        self._show = show
        self._seen: dict[int, int] = {}
        """Groups that each shard had completed when it was asked last."""
        self._silent: set[int] = set()
        self._version = 0

    async def run(self, stop: asyncio.Event) -> None:
        await self._look_at_policy()
        await self._recent()
        while not (self._wanted.once or stop.is_set()):
            await set_within(stop, POLL_S)
            await self._look_at_policy()
            for shard in range(self._shards):
                await self._new(shard, stop)

    async def _recent(self) -> None:
        """Show the newest trajectories, oldest first; those of the newest groups are read first."""
        leases: list[int] = []
        for shard in range(self._shards):
            end = await self._stored(shard, NOTHING_AFTER)
            if end is None:
                continue
            self._seen[shard] = end.total
            count = self._wanted.recent if self._wanted.task is None else SEARCHED
            last = await self._stored(shard, max(0, end.total - count)) if count else None
            leases += [] if last is None else last.lease_ids
        if self._wanted.lease is not None:
            leases = [self._wanted.lease]
        found: list[dict[str, Json]] = []
        for lease in sorted(leases, reverse=True):
            if len(found) >= self._wanted.recent:
                break
            try:
                found += reversed(list(await self._group(lease)))
            except BusError as error:
                _say(f"group of lease {lease} is not shown: {error}")
        for one in reversed(found[: self._wanted.recent]):
            self._show(one)

    async def _new(self, shard: int, stop: asyncio.Event) -> None:
        """Show what a shard has completed since; all of it, if it was silent before."""
        news = await self._stored(shard, self._seen.get(shard, NOTHING_AFTER))
        if news is None:
            return
        if shard not in self._seen or news.total < news.after:
            self._seen[shard] = news.total  # a shard that was away when this began, or was restored
            return
        for lease in news.lease_ids:
            if stop.is_set():
                return
            if self._wanted.lease in (None, lease):
                try:
                    group = await self._group(lease)
                except BusError as error:
                    log.debug("shard_does_not_answer", shard=shard, reason=str(error))
                    return  # the next round asks again
                for one in group:
                    self._show(one)
            self._seen[shard] += 1

    async def _stored(self, shard: int, after: int) -> StoredGroups | None:
        subject = self._bus.subject("rpc", "stored", shard)
        try:
            found = await self._bus.request(
                subject, StoredRequest(after=after), StoredGroups, timeout_s=ANSWER_TIMEOUT_S
            )
        except BusError as error:
            if shard not in self._silent:
                _say(f"shard {shard} does not answer ({error}): its trajectories are not shown")
            self._silent.add(shard)
            return None
        self._silent.discard(shard)
        return found

    async def _group(self, lease: int) -> Iterator[dict[str, Json]]:
        """Return the trajectories of a group, none of one that is retired or damaged; only one group is held
        at a time. Raises `BusError` while its shard is away."""
        subject = self._bus.subject("rpc", "read", shard_of(lease, self._shards))
        request = ReadRequest(lease_ids=(lease,))
        try:
            batches = await self._bus.request_many(
                subject, request, TrajectoryBatch, timeout_s=ANSWER_TIMEOUT_S
            )
        except (BusError, UnreadableGroupsError) as error:
            if isinstance(error, BusError) and is_away(error):
                raise
            _say(f"group of lease {lease} is not shown: {error}")
            return iter(())
        matching = (t for batch in batches for t in batch.trajectories if self._wanted.matches(t))
        return (
            describe(t, self._tokenizer, self._version, token_ids=self._wanted.token_ids) for t in matching
        )

    async def _look_at_policy(self) -> None:
        found = await self._bus.get("policy", PolicyManifest)
        self._version = self._version if found is None else found[0].policy_version


def _say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)  # noqa: T201 - the user's terminal


def describe(
    trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase, newest: int, *, token_ids: bool
) -> dict[str, Json]:
    """Return a trajectory as an object whose keys docs/operations.md describes; `newest` is the version that
    its staleness is counted from."""
    t = trajectory
    oldest = t.oldest_version if t.loss_mask.any() else None
    found: dict[str, Json] = {
        "trajectory_id": t.trajectory_id,
        "lease_id": t.lease_id,
        "rollout": t.rollout,
        "agent": t.agent,
        "policy": t.policy,
        "actor": t.actor,
        "reward": None if t.reward_due else t.reward,
        "reward_components": dict(t.reward_components),
        "reward_source": t.reward_source,
        "end": t.end,
        "trained": t.is_trained,
        "tokens": len(t.token_ids),
        "masked_tokens": int(t.loss_mask.sum()),
        "oldest_version": oldest,
        "newest_version": None if oldest is None else t.newest_version,
        "staleness": None if oldest is None else newest - oldest,
        "metadata": dict(t.metadata),
        "parts": [_part(t, tokenizer, *span) for span in spans(t)],
    }
    if token_ids:
        found["token_ids"] = t.token_ids.tolist()
        found["loss_mask"] = t.loss_mask.tolist()
    return found


def _part(
    t: Trajectory, tokenizer: PreTrainedTokenizerBase, start: int, stop: int, number: int | None
) -> dict[str, Json]:
    """Return the text of a part. What the policy did not sample has its roles in the chat template's
    tokens."""
    versions = t.policy_versions[start:stop]
    sampled = versions[versions >= 0]
    turn = None if number is None else t.turns[number]
    return {
        "by": "context" if turn is None else "policy",
        "start": start,
        "stop": stop,
        "text": str(tokenizer.decode(t.token_ids[start:stop].tolist())),
        "masked_tokens": int(t.loss_mask[start:stop].sum()),
        "versions": [int(sampled.min()), int(sampled.max())] if len(sampled) else None,
        "finish_reason": None if turn is None else turn.finish_reason,
        "reward": None if turn is None else turn.reward,
    }


def lines(found: dict[str, Json]) -> str:
    """Return the object of `describe` as lines for a terminal, without the text's control characters."""
    reward = "reward due" if found["reward"] is None else f"reward {found['reward']:g}"
    stale = "" if found["staleness"] is None else f", staleness {found['staleness']}"
    shown = [
        f"=== {found['trajectory_id']} by {found['agent']} on {found['actor']}: {reward}, {found['end']}, "
        f"{_versions(found['oldest_version'], found['newest_version'])}{stale}"
    ]
    parts = found["parts"]
    for part in parts if isinstance(parts, list) else ():
        assert isinstance(part, dict)
        shown += [f"--- {_heading(part)}", _CONTROL.sub("\N{REPLACEMENT CHARACTER}", str(part["text"]))]
    return "\n".join(shown)


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
