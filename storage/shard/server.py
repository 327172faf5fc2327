"""One replay shard on the bus: takes trajectories off the stream, stores them, answers reads."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import structlog
from numpy.typing import NDArray

from bus.agent_rewards import episode_rewards
from bus.blobs import xxh3_of
from bus.codec import Message, encode
from bus.connection import Bus
from bus.errors import BusError, LostDataError, SchemaError, StorageError, UnreadableGroupsError
from bus.images import ImageCount
from bus.messages import GroupRejected, RewardGiven, parse_trajectory_name
from bus.requests import (
    Done,
    FullGroups,
    FullGroupsRequest,
    Located,
    LocateRequest,
    ReadRequest,
    StoredGroups,
    StoredRequest,
)
from bus.streams.consume import Inbox, consume_batches
from bus.streams.message_parts import Parts
from bus.streams.publish import Publisher, together
from bus.topology import shard_of, trajectories_stream
from bus.trajectory import LEAST_APART_BYTES, KeptTurn, Trajectory, TrajectoryBatch
from storage.disk.host_identity import host_identity
from storage.shard.group_requests import serve_closing, serve_siblings, serve_turns
from storage.shard.ingest_checks import Quarantine
from storage.shard.routed_experts import ExpertFiles
from storage.shard.shared_prefixes import different_beginnings
from storage.store.addresses import locate
from storage.store.replay import ReplayStore

log = structlog.get_logger()
BATCH = 64
"""Messages a segment, at most."""
ANSWER_BYTES = 1 << 20
"""Trajectories of a read are packed into answers of about this size."""
ANSWER_LEASES = 65536
REWARDS = 1024
"""Late rewards that become durable together."""
ANSWER_SPREADS = 1024
"""Groups in an answer that tells their spreads, rewards or computed tokens, for which each is read from the
disk."""
READING_S = 0.4
"""Seconds after which no more of these groups are read. The dispatcher waits a second for an answer: from a
slow disk it would hear nothing, and ask for the same groups for ever."""


class Shard:
    """The single writer of one store, between the bus and the disk."""

    def __init__(
        self, bus: Bus, store: ReplayStore, number: int, *,
        shards: int, was_issued: Callable[[int], bool], linger_s: float,
        hear_of: Callable[[int], Awaitable[None]] | None = None, quarantine: Quarantine | None = None,
    ) -> None:  # fmt: skip
        """`hear_of` is called with a lease before `was_issued` is, where that must be asked for elsewhere."""
        self.store = store
        self._bus = bus
        self._publisher = Publisher(bus)
        self._number = number
        self._shards = shards
        self._was_issued = was_issued
        self._hear_of = hear_of
        self._linger_s = linger_s
        self._quarantine = quarantine
        self._experts = ExpertFiles(store.directory)
        self.serving = asyncio.Event()
        """Set once the shard hears requests."""

    async def run(self, stop: asyncio.Event) -> None:
        serving = [
            await self._bus.serve(self._bus.subject("rpc", "read", self._number), ReadRequest, self._on_read),
            await self._bus.serve(
                self._bus.subject("rpc", "locate", self._number), LocateRequest, self._on_locate
            ),
            await self._bus.serve(
                self._bus.subject("rpc", "stored", self._number), StoredRequest, self._on_stored
            ),
            await serve_siblings(self._bus, self.store, self._number),
            await serve_turns(self._bus, self.store, self._number),
            await serve_closing(self._bus, self.store, self._number),
            await self._bus.serve(
                self._bus.subject("rpc", "full_groups", self._number), FullGroupsRequest, self._on_full
            ),
        ]
        self.serving.set()
        parts = Parts(self._bus, on_unreadable=self._on_unreadable)
        durable = self._bus.topology.shard_durable(self._number)
        inbox = Inbox(self._bus, trajectories_stream(self._number), durable, parts)
        rewards = Inbox(self._bus, "OUTCOMES", f"rewards-{self._number}")
        try:
            await together(
                (
                    consume_batches(
                        inbox, self._bus, TrajectoryBatch, self._append, stop=stop, limit=BATCH,
                        linger_s=self._linger_s, apart_bytes=lambda batch: batch.apart_bytes,
                    ),
                    self._experts.tend(self._bus, self._number, stop),
                    consume_batches(rewards, self._bus, RewardGiven, self._give, stop=stop, limit=REWARDS),
                )
            )  # fmt: skip
        finally:  # or else two shards would answer once the next one has begun
            for subscription in serving:
                await subscription.unsubscribe()

    async def _append(self, batches: list[TrajectoryBatch]) -> None:
        """The segment is durable when this returns; only then are the messages acked."""
        before = self.store.completions
        trajectories = [trajectory for batch in batches for trajectory in batch.trajectories]
        if self._hear_of is not None and trajectories:
            await self._hear_of(max(trajectory.lease_id for trajectory in trajectories))
        if self._quarantine is not None:
            await self._quarantine.check_identity(trajectories)  # no refund: it may not be the sender's lease
        try:
            for trajectory in trajectories:
                self._refuse_stranger(trajectory, actor=trajectory.actor)
            joined = [await self._with_experts(batch) for batch in batches]
            await self._keep_turns([turn for batch in joined for turn in batch.turns])
            trajectories = [trajectory for batch in joined for trajectory in batch.whole]
            if self._quarantine is not None:
                await self._quarantine.check_content(trajectories)
            completed = await asyncio.to_thread(self.store.append, trajectories)
        except SchemaError as error:
            if len(batches) == 1:  # this message will be set aside
                await self._refund({t.lease_id for t in trajectories}, str(error))
            raise
        for apart in [batch.apart for batch in batches if batch.apart is not None]:
            await asyncio.to_thread(self._experts.remove, apart)
        if completed:
            await self._bus.notify(self._bus.subject("notice", "stored"), self._news(before))

    async def _with_experts(self, batch: TrajectoryBatch) -> TrajectoryBatch:
        """Return the message with the routed experts that its actor sent here before it. Of one that was
        stored already nothing is left to store, and turns are sampled again. Raises `SchemaError` where they
        are gone."""
        if batch.apart is None:
            return batch
        data, first = await asyncio.to_thread(self._experts.read, batch.apart), batch.sampled[0]
        if data is not None:
            try:
                return await asyncio.to_thread(batch.with_experts, data)
            except SchemaError as error:
                raise SchemaError(str(error), kind="experts", actor=first.actor) from error
        if not self.store.lacks(batch.trajectories):
            return replace(batch, trajectories=(), turns=(), apart=None)
        raise SchemaError(
            f"lease {first.lease_id}: {batch.apart_bytes} bytes of routed experts are not in "
            f"{self.store.directory}, whose actor sends them before the message: was the directory replaced?",
            kind="experts_missing",
            actor=first.actor,
        )

    async def _keep_turns(self, turns: list[KeptTurn]) -> None:
        """Store turns of rollouts that have not ended. What is refused is set aside; nobody waits for it."""
        if not turns:
            return
        if self._hear_of is not None:
            await self._hear_of(max(turn.lease_id for turn in turns))
        for turn in turns:
            self._refuse_stranger(turn, actor=turn.actor)
        if self._quarantine is not None:
            await self._quarantine.check_turns(turns)
        await asyncio.to_thread(self.store.turns.keep, turns)

    async def _give(self, rewards: list[RewardGiven]) -> None:
        """The rewards are durable when this returns; only then are the messages acked."""
        before = self.store.completions
        for given in rewards:
            self._refuse_stranger(given, kind="reward")
        if await asyncio.to_thread(self.store.give, rewards):
            await self._bus.notify(self._bus.subject("notice", "stored"), self._news(before))

    def _refuse_stranger(
        self, one: Trajectory | RewardGiven | KeptTurn, *, kind: str = "", actor: str = ""
    ) -> None:
        """What is stored stays: a lease that is issued later would find its samples taken. Raises
        `SchemaError` for what is of another shard or of no lease of this run."""
        name = one.name if isinstance(one, KeptTurn) else one.trajectory_id
        lease_id = one.lease_id
        home = shard_of(lease_id, self._shards)
        if home != self._number:
            reason = f"{name}: lease {lease_id} belongs to shard {home}, not {self._number}"
            raise SchemaError(reason, kind=kind or "misdirected", actor=actor)
        if not self._was_issued(lease_id):
            reason = f"{name}: lease {lease_id} was never issued in this run"
            raise SchemaError(reason, kind=kind or "not_issued", actor=actor)

    async def _on_unreadable(self, subject: str, message_id: str, error: SchemaError) -> None:
        """Refund the lease whose group nobody can read: the id of an actor's message names it."""
        try:
            lease_id, _ = parse_trajectory_name(f"{message_id.partition('.')[0]}.0")
        except SchemaError:
            log.warning("group_without_a_lease", subject=subject, message_id=message_id)
            return
        if self._hear_of is not None:
            await self._hear_of(lease_id)
        if shard_of(lease_id, self._shards) == self._number and self._was_issued(lease_id):
            await self._refund({lease_id}, str(error))

    async def _refund(self, lease_ids: set[int], detail: str) -> None:
        """Nobody will send these groups again: without a refund the learner would wait for them for ever."""
        for lease_id in sorted(lease_ids):
            event = GroupRejected(lease_id=lease_id, reason="set_aside", detail=detail)
            subject = self._bus.subject("outcomes", "rejected")
            await self._publisher.publish(subject, encode(event), message_id=f"rejected-{lease_id}")

    async def _on_stored(self, request: StoredRequest) -> list[Message]:
        """The dispatcher decides whether its ledger is older than what is noted here: it knows what of it
        changed since it asked."""
        noted = self.store.settled
        news = replace(
            self._news(max(request.after, noted.forgotten)),
            after=request.after,
            directory=str(self.store.directory) if noted.through else "",
            settled_through=noted.through,
            forgotten=noted.forgotten,
            settled=tuple(filter(noted.covers, request.rolling_out)),
        )
        if not (request.spreads or request.rewards or request.computed_tokens or request.images):
            return [news]
        return [await asyncio.to_thread(self._read_news, request, news)]

    def _read_news(self, request: StoredRequest, news: StoredGroups) -> StoredGroups:
        """Return the first of the news, one at least, with what is known only by reading the groups."""
        tokens, spreads, rewards, computed = list(news.tokens[:ANSWER_SPREADS]), [], [], []
        images = []
        began, through = time.monotonic(), 0
        for n, lease_id in enumerate(news.lease_ids[:ANSWER_SPREADS]):
            if n and time.monotonic() > began + READING_S:
                break
            trained, through = self._trained(lease_id), n + 1
            if request.spreads or request.rewards:
                by_agent = _rewards(trained)
                spreads.append(_spread(by_agent))
                rewards.append(_joined(by_agent))
            if request.computed_tokens:
                texts = [trajectory.token_ids for trajectory in trained]
                tokens[n] = sum(map(len, texts)) or tokens[n]
                computed.append(different_beginnings(texts))
            if request.images:
                images.append(ImageCount.of(image for trajectory in trained for image in trajectory.images))
        return replace(
            news,
            lease_ids=news.lease_ids[:through],
            tokens=tuple(tokens[:through]),
            spreads=tuple(spreads) if request.spreads else (),
            rewards=tuple(rewards) if request.rewards else (),
            computed_tokens=tuple(computed),
            images=tuple(images),
        )

    def _trained(self, lease_id: int) -> list[Trajectory]:
        """Return what of a group is trained; nothing when it cannot be read, as after its removal."""
        try:
            found = self.store.read([lease_id])
        except StorageError as error:
            log.warning("group_not_known", lease_id=lease_id, reason=str(error))
            return []
        return [trajectory for trajectory in found if trajectory.is_trained]

    async def _on_full(self, request: FullGroupsRequest) -> list[Message]:
        return [FullGroups(lease_ids=tuple(self.store.full(request.lease_ids)))]

    async def _on_read(self, request: ReadRequest) -> list[Message]:
        try:
            found = await asyncio.to_thread(self.store.read, request.lease_ids)
        except LostDataError as error:
            lost = await asyncio.to_thread(self._lost, request.lease_ids)
            raise UnreadableGroupsError(str(error), lost) from error
        except StorageError as error:
            raise BusError(str(error)) from error
        if request.apart:
            return [*await asyncio.to_thread(lambda: [*_without_experts(found)]), Done()]
        return [*_packed(found), Done()]

    def _lost(self, lease_ids: Sequence[int]) -> tuple[int, ...]:
        lost: list[int] = []
        for lease_id in lease_ids:
            try:
                self.store.read([lease_id])
            except LostDataError:
                lost.append(lease_id)
        return tuple(lost)

    async def _on_locate(self, request: LocateRequest) -> list[Message]:
        host = host_identity()
        if request.host != host:
            return [Located(host=host)]
        try:
            return [await asyncio.to_thread(locate, self.store, request.lease_ids)]
        except StorageError as error:
            raise BusError(str(error)) from error

    def _news(self, after: int) -> StoredGroups:
        leases = tuple(self.store.completed_after(after, ANSWER_LEASES))
        return StoredGroups(
            shard=self._number,
            after=after,
            lease_ids=leases,
            total=self.store.completions,
            tokens=tuple(map(self.store.tokens_of, leases)),
        )


def _packed(trajectories: Sequence[Trajectory]) -> Iterator[TrajectoryBatch]:
    """Batches of about `ANSWER_BYTES`, so that no answer exceeds what the bus carries."""
    batch: list[Trajectory] = []
    size = 0
    for trajectory in trajectories:
        batch.append(trajectory)
        size += 16 * len(trajectory.token_ids) + len(trajectory.routed_experts) + 512
        size += 64 * len(trajectory.turns) + len(trajectory.kept_counts) + len(trajectory.kept_tokens)
        size += sum(len(image.data) for image in trajectory.images)
        if size >= ANSWER_BYTES:
            yield TrajectoryBatch.of(batch)
            batch, size = [], 0
    if batch:
        yield TrajectoryBatch.of(batch)


def _without_experts(trajectories: Sequence[Trajectory]) -> Iterator[TrajectoryBatch]:
    """Answers of a group each, without its routed experts if they are many (`ExpertServer`)."""
    for _, siblings in groupby(trajectories, key=lambda trajectory: trajectory.lease_id):
        group = list(siblings)
        experts = [trajectory.routed_experts for trajectory in group]
        if sum(map(len, experts)) < LEAST_APART_BYTES:
            yield from _packed(group)
        else:
            yield TrajectoryBatch.of(group).without_experts(xxh3_of(experts))


def _rewards(trained: Sequence[Trajectory]) -> list[NDArray[np.float64]]:
    by_agent = episode_rewards(trajectory.agent_reward for trajectory in trained).values()
    return [np.array(list(episodes.values())) for episodes in by_agent]


def _spread(rewards: Sequence[NDArray[np.float64]]) -> float:
    """Return the mean over episodes and agents of |reward - that agent's mean|; 0 without any."""
    if not rewards:
        return 0.0
    return float(np.concatenate([np.abs(values - values.mean()) for values in rewards]).mean())


def _joined(rewards: Sequence[NDArray[np.float64]]) -> tuple[float, ...]:
    return tuple(value for values in rewards for value in values.tolist())
