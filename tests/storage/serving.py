"""Storage at work in the background of a test, and stand-ins for the learner and the actors of its run."""

import asyncio
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from nats.js.errors import NotFoundError

from bus.codec import Message, decode, encode
from bus.connection import Bus
from bus.errors import BusError
from bus.messages import BlobRef, DeadLetter, GroupRejected, Lease, PolicyManifest, Prompt
from bus.requests import BatchLease, BatchRequest, Done, LearnerResumed, StepCommitted, Waiting
from bus.topology import shard_of
from bus.trajectory import Trajectory, TrajectoryBatch
from storage.client.reader import ReplayReader
from storage.dispatch.dispatcher import TOKENS, Counting, Dispatcher
from storage.ledger.ledger import Ledger
from storage.prompts.data_sets import DataSets
from storage.prompts.order import PromptSource
from storage.settings.admission import AdmissionConfig
from storage.shard.server import Shard
from storage.store.replay import ReplayStore
from tests.factories import make_trajectory

R = TypeVar("R", bound=Message)
SHARDS = 2
PROMPTS = [Prompt(content=f"prompt {n}") for n in range(7)]
SMALL = AdmissionConfig(groups_per_step=2, samples_per_prompt=2, max_staleness=1)
BLOB = BlobRef(subject="nowhere", chunks=1, size_bytes=1, digest="0")


@contextmanager
def refusing_disk() -> Iterator[None]:
    """Every write of this process to a file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@asynccontextmanager
async def running(
    work: Callable[[asyncio.Event], Coroutine[None, None, None]],
) -> AsyncIterator[asyncio.Task]:
    """`work` in the background, stopped kindly at the end, when its errors appear."""
    stop = asyncio.Event()
    task = asyncio.create_task(work(stop))
    try:
        yield task
    finally:
        stop.set()
        async with asyncio.timeout(30):  # a shard may wait for the answer of a dispatcher that ended just now
            await task


async def until(true: Callable[[], bool | Awaitable[bool]], *, seconds: float = 60) -> None:
    """Return as soon as `true` holds."""
    async with asyncio.timeout(seconds):
        while True:
            found = true()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.005)


@dataclass
class Storage:
    """The parts of one storage process."""

    ledger: Ledger
    dispatcher: Dispatcher
    stores: list[ReplayStore]
    shards: list[Shard]
    data: DataSets

    async def run(self, stop: asyncio.Event, *, reissue: bool) -> None:
        async with asyncio.TaskGroup() as tasks:
            for shard in self.shards:
                tasks.create_task(shard.run(stop))
            tasks.create_task(self.dispatcher.run(stop, reissue=reissue))


def make_shard(bus: Bus, store: ReplayStore, number: int, *, issued: int = 1000) -> Shard:
    """A shard of two, in a run that has issued so many leases."""
    return Shard(bus, store, number, shards=SHARDS, was_issued=lambda n: 0 <= n < issued, linger_s=0.0)


@contextmanager
def opened(
    bus: Bus,
    directory: Path,
    admission: AdmissionConfig = SMALL,
    prompts: Sequence[Prompt] = PROMPTS,
    sources: Sequence[PromptSource] = (),
    *,
    counting: Counting = TOKENS,
) -> Iterator[Storage]:
    """The parts of a storage process on `directory`, not yet running."""
    with ExitStack() as stack:
        ledger = stack.enter_context(closing(Ledger.open(directory / "ledger.sqlite")))
        stores = [stack.enter_context(closing(ReplayStore.open(directory / str(n)))) for n in range(SHARDS)]
        data = DataSets(ledger, directory)
        data.configure(prompts, seed=0, shuffle=True, source="the test", sources=sources)
        dispatcher = Dispatcher(bus, ledger, data, admission, shards=SHARDS, seed=0, counting=counting)
        shards = [
            Shard(bus, store, n, shards=SHARDS, was_issued=ledger.was_issued, linger_s=0.0)
            for n, store in enumerate(stores)
        ]
        yield Storage(ledger, dispatcher, stores, shards, data)


@asynccontextmanager
async def serving(
    bus: Bus,
    directory: Path,
    admission: AdmissionConfig = SMALL,
    *,
    reissue: bool = False,
    admit: bool = True,
    prompts: Sequence[Prompt] = PROMPTS,
    sources: Sequence[PromptSource] = (),
    counting: Counting = TOKENS,
) -> AsyncIterator[Storage]:
    """A storage process on `directory`, from start to stop."""
    with opened(bus, directory, admission, prompts, sources, counting=counting) as storage:
        if admit:
            storage.dispatcher.admit()
        async with running(lambda stop: storage.run(stop, reissue=reissue)):
            yield storage


def manifest(
    version: int,
    *,
    incarnation: str = "a",
    stage: str = "rl",
    trains_from: int = 0,
    ess_fraction: float | None = None,
    pause_reason: str = "",
) -> PolicyManifest:
    """A policy whose weights nobody fetches."""
    return PolicyManifest(
        policy_version=version,
        incarnation=incarnation,
        snapshot=BLOB,
        model=BLOB,
        stage=stage,
        trains_from=trains_from,
        ess_fraction=ess_fraction,
        pause_reason=pause_reason,
    )


@dataclass
class LearnerStandIn:
    """What a learner says to storage."""

    bus: Bus
    incarnation: str = "a"
    trains_from: int = 0
    reasons: list[str] = field(default_factory=list)

    async def publish(
        self, version: int, *, stage: str = "rl", ess_fraction: float | None = None
    ) -> PolicyManifest:
        made = manifest(
            version,
            incarnation=self.incarnation,
            stage=stage,
            trains_from=self.trains_from,
            ess_fraction=ess_fraction,
        )
        await self.bus.put("policy", made)
        await self.bus.notify(self.bus.subject("notice", "policy"), made)
        return made

    async def ask(self, step: int) -> BatchLease | Waiting:
        request = BatchRequest(
            step=step, policy_version=self.trains_from + step - 1, incarnation=self.incarnation
        )
        return await self._say("batch", request, BatchLease, Waiting)

    async def batch(self, step: int) -> list[int]:
        """Ask until there is a batch; its leases."""
        async with asyncio.timeout(60):
            while True:
                answer = await self.ask(step)
                if isinstance(answer, BatchLease):
                    return [group.lease_id for group in answer.groups]
                self.reasons.append(answer.reason)

    async def commit(self, step: int) -> None:
        await self._say("committed", StepCommitted(step=step, incarnation=self.incarnation), Done)

    async def resume(self, step: int) -> None:
        await self._say("resumed", LearnerResumed(step=step, incarnation=self.incarnation), Done)

    async def _say(self, what: str, message: Message, *expected: type[R]) -> R:
        """Storage may still be starting."""
        async with asyncio.timeout(60):
            while True:
                try:
                    return await self.bus.request(
                        self.bus.subject("rpc", what), message, *expected, timeout_s=20
                    )
                except BusError as error:
                    if "nobody serves" not in str(error):
                        raise
                    await asyncio.sleep(0.005)


async def read_batch(
    reader: ReplayReader, step: int, *, on_wait: Callable[[str], None] = lambda reason: None
) -> list[list[Trajectory]]:
    """The groups of a step, leased and fetched as a learner does."""
    lease = await reader.lease(step, step - 1, on_wait=on_wait)
    return await reader.fetch(lease.groups, on_wait=on_wait)


async def send(bus: Bus, *trajectories: Trajectory, shard: int | None = None) -> None:
    """Publish trajectories in one message, as an actor does."""
    home = shard_of(trajectories[0].lease_id, SHARDS) if shard is None else shard
    await bus.js.publish(
        bus.subject("trajectories", home), encode(TrajectoryBatch(trajectories=trajectories))
    )


async def send_groups(bus: Bus, lease_ids: Iterable[int]) -> None:
    """Publish complete groups of two."""
    for lease_id in lease_ids:
        await send(bus, *(make_trajectory(lease_id, sample) for sample in range(2)))


async def send_rejections(bus: Bus, lease_ids: Iterable[int], reason: str = "zero_variance") -> None:
    """Publish that these groups were filtered out."""
    for lease_id in lease_ids:
        event = GroupRejected(lease_id=lease_id, reason=reason)
        await bus.js.publish(bus.subject("outcomes", "rejected"), encode(event))


async def messages(bus: Bus, stream: str) -> int:
    """How many messages the stream has."""
    return int((await bus.js.stream_info(bus.topology.stream(stream))).state.messages)


async def has(bus: Bus, stream: str, count: int) -> None:
    """Return once the stream has so many messages."""

    async def enough() -> bool:
        return await messages(bus, stream) == count

    await until(enough)


async def leases(bus: Bus) -> list[Lease]:
    """Every lease on the bus: nobody takes any in these tests."""
    return [decode(data, Lease) for data in await _contents(bus, "TASKS")]


async def dead_letters(bus: Bus) -> list[DeadLetter]:
    """Everything that was set aside."""
    return [decode(data, DeadLetter) for data in await _contents(bus, "DEAD")]


async def _contents(bus: Bus, stream: str) -> list[bytes]:
    name = bus.topology.stream(stream)
    state = (await bus.js.stream_info(name)).state
    found = []
    for sequence in range(state.first_seq, state.last_seq + 1):
        with suppress(NotFoundError):  # acked, or deleted
            found.append((await bus.js.get_msg(name, sequence)).data or b"")
    return found


async def expect_redelivery_after(bus: Bus, seconds: float, durable: str = "shard-0") -> None:
    """Shorten the ack wait of a durable consumer."""
    stream, config = next(
        found for found in bus.topology.consumers(SHARDS) if found[1].durable_name == durable
    )
    await bus.js.delete_consumer(bus.topology.stream(stream), durable)
    await bus.js.add_consumer(bus.topology.stream(stream), config.evolve(ack_wait=seconds))
