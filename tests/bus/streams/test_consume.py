"""The consumer loop under crashes, poison, restarts and back-pressure."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from nats.js.api import ConsumerConfig

from bus.codec import Message, decode, encode
from bus.connection import Bus
from bus.errors import BusError
from bus.messages import DeadLetter, Lease
from bus.requests import Done
from bus.server.nats_server import MAX_PAYLOAD, NatsServer
from bus.streams import consume as consume_module
from bus.streams import received as received_module
from bus.streams.consume import Inbox, consume, consume_batches
from bus.streams.publish import Publisher
from bus.trajectory import Trajectory
from tests.conftest import Connect
from tests.factories import make_lease, make_trajectory


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consume_module, "POLL_S", 0.2)
    monkeypatch.setattr(consume_module, "GONE_S", 0.0)


async def send_leases(bus: Bus, count: int, first: int = 0) -> None:
    for n in range(first, first + count):
        await bus.js.publish(bus.subject("tasks", "rollout"), encode(make_lease(n)))


async def expect_redelivery_after(bus: Bus, seconds: float) -> None:
    """Shorten the ack wait of the rollout consumer."""
    name = bus.topology.stream("TASKS")
    config = next(c for _, c in bus.topology.consumers(0) if c.durable_name == "rollout")
    await bus.js.delete_consumer(name, "rollout")
    await bus.js.add_consumer(name, config.evolve(ack_wait=seconds))


async def keeps(bus: Bus, count: int, stream: str = "TASKS") -> bool:
    """Tell whether the stream comes to have so many messages: it counts an ack a moment after it was sent."""
    try:
        async with asyncio.timeout(60):
            while (await bus.js.stream_info(bus.topology.stream(stream))).state.messages != count:
                pass
    except TimeoutError:
        return False
    return True


class Recorder:
    """A handler that records leases, and stops the loop at the `until`-th."""

    def __init__(self, until: int) -> None:
        self.stop = asyncio.Event()
        self.leases: list[int] = []
        self._until = until

    async def __call__(self, lease: Lease) -> None:
        self.leases.append(lease.lease_id)
        if len(self.leases) >= self._until:
            self.stop.set()


async def run(bus: Bus, handle: Recorder, inbox: Inbox | None = None, concurrency: int = 4) -> None:
    async with asyncio.timeout(60):
        inbox = inbox or Inbox(bus, "TASKS", "rollout")
        await consume(inbox, bus, Lease, handle, stop=handle.stop, concurrency=concurrency)


@pytest.mark.nats
async def test_message_returns_after_its_handler_crashed(bus: Bus):
    await expect_redelivery_after(bus, 0.2)
    await send_leases(bus, 1)

    class CrashOnce(Recorder):
        async def __call__(self, lease: Lease) -> None:
            await super().__call__(lease)
            if len(self.leases) == 1:
                raise RuntimeError("crashed")

    handler = CrashOnce(until=2)
    inbox = Inbox(bus, "TASKS", "rollout")
    with pytest.raises(ExceptionGroup, match="unhandled errors"):
        await run(bus, handler, inbox)
    await run(bus, handler, inbox)
    assert set(handler.leases) == {0}  # on a slow machine more than twice within this ack wait
    assert await keeps(bus, 0)


@pytest.mark.nats
async def test_crash_of_one_handler_cancels_its_siblings_whose_messages_return(bus: Bus):
    await expect_redelivery_after(bus, 0.2)
    await send_leases(bus, 3)
    begun = asyncio.Semaphore(0)

    async def handle(lease: Lease) -> None:
        begun.release()
        if lease.lease_id == 1:
            for _ in range(3):
                await begun.acquire()
            raise RuntimeError("crashed")
        await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup, match="unhandled errors"):
        await consume(Inbox(bus, "TASKS", "rollout"), bus, Lease, handle, stop=asyncio.Event(), concurrency=3)
    returned = set[int]()  # on a slow machine one may come twice within this ack wait
    stop = asyncio.Event()

    async def note(lease: Lease) -> None:
        returned.add(lease.lease_id)
        if returned == {0, 1, 2}:
            stop.set()

    async with asyncio.timeout(60):
        await consume(Inbox(bus, "TASKS", "rollout"), bus, Lease, note, stop=stop, concurrency=3)


@pytest.mark.nats
async def test_acked_messages_do_not_return(bus: Bus):
    await send_leases(bus, 20)
    handler = Recorder(until=20)
    await run(bus, handler)
    assert sorted(handler.leases) == list(range(20))
    assert await keeps(bus, 0)


@pytest.mark.nats
async def test_no_more_handlers_run_at_once_than_asked_for(bus: Bus):
    await send_leases(bus, 30)
    running = most = finished = 0
    stop = asyncio.Event()

    async def handle(_: Lease) -> None:
        nonlocal running, most, finished
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        running, finished = running - 1, finished + 1
        if finished == 30:
            stop.set()

    async with asyncio.timeout(60):
        await consume(Inbox(bus, "TASKS", "rollout"), bus, Lease, handle, stop=stop, concurrency=3)
    assert most == 3


@pytest.mark.nats
async def test_busy_consumer_leaves_other_messages_to_its_siblings(bus: Bus, connect: Connect):
    await send_leases(bus, 10)
    busy, free, release = asyncio.Semaphore(0), Recorder(until=8), asyncio.Event()

    async def handle(_: Lease) -> None:
        busy.release()
        await release.wait()

    async with connect("other") as other, asyncio.TaskGroup() as tasks:
        stop = asyncio.Event()
        loop = consume(Inbox(bus, "TASKS", "rollout"), bus, Lease, handle, stop=stop, concurrency=2)
        tasks.create_task(loop)
        for _ in range(2):
            await busy.acquire()
        await run(other, free)  # gets all the others, though the first never finishes
        stop.set()
        release.set()
    assert len(free.leases) == 8
    assert await keeps(bus, 0)


@pytest.mark.nats
async def test_stop_finishes_what_has_begun_and_gives_the_rest_back_at_once(bus: Bus):
    await send_leases(bus, 10)
    stop, begun, finished = asyncio.Event(), [], []

    async def handle(lease: Lease) -> None:
        begun.append(lease.lease_id)
        if len(begun) == 4:
            stop.set()
        await stop.wait()
        await asyncio.sleep(0.05)
        finished.append(lease.lease_id)

    async with asyncio.timeout(60):
        await consume(Inbox(bus, "TASKS", "rollout"), bus, Lease, handle, stop=stop, concurrency=4)
    assert len(finished) == 4
    assert await keeps(bus, 6)
    rest = Recorder(until=6)
    began = time.monotonic()
    await run(bus, rest)
    assert time.monotonic() - began < 15  # far below the ack wait
    assert sorted(finished + rest.leases) == list(range(10))


@pytest.mark.nats
async def test_what_was_received_and_not_taken_can_be_given_back_and_taken_again(bus: Bus):
    await send_leases(bus, 10)
    inbox = Inbox(bus, "TASKS", "rollout")
    [first] = await inbox.take(1, 20.0)
    await first.ack()
    await inbox.give_back()
    taken = []
    async with asyncio.timeout(60):
        while len(taken) < 9:
            taken += await inbox.take(9)
    assert sorted(decode(raw.data, Lease).lease_id for raw in taken) == list(range(1, 10))


@pytest.mark.nats
async def test_idle_loop_notices_stop(bus: Bus):
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.1, stop.set)
    began = time.monotonic()
    await consume(Inbox(bus, "TASKS", "rollout"), bus, Lease, Recorder(until=1), stop=stop, concurrency=1)
    assert time.monotonic() - began < 15


@pytest.mark.nats
async def test_message_not_understood_is_set_aside_with_its_reason_and_the_rest_goes_on(bus: Bus):
    subject = bus.subject("tasks", "rollout")
    await bus.js.publish(subject, b"garbage")
    await bus.js.publish(subject, encode(Done()))
    await send_leases(bus, 2)
    handler = Recorder(until=2)
    await run(bus, handler)
    assert handler.leases == [0, 1]
    assert await keeps(bus, 0)
    letters = [await dead_letter(bus, n) for n in (1, 2)]
    assert letters[0] == DeadLetter(subject=subject, reason=letters[0].reason, data=b"garbage", origin="1")
    assert "not MessagePack" in letters[0].reason
    assert "unexpected message 'done'" in letters[1].reason


async def dead_letter(bus: Bus, sequence: int) -> DeadLetter:
    found = await bus.js.get_msg(bus.topology.stream("DEAD"), sequence)
    return decode(found.data or b"", DeadLetter)


@pytest.mark.nats
async def test_poison_as_large_as_the_server_takes_is_set_aside_in_part(bus: Bus):
    data = b"x" * MAX_PAYLOAD
    await bus.js.publish(bus.subject("tasks", "rollout"), data)
    await send_leases(bus, 1)
    handler = Recorder(until=1)
    await run(bus, handler)
    letter = await dead_letter(bus, 1)
    assert data.startswith(letter.data)
    assert len(letter.data) > 0.99 * MAX_PAYLOAD


@pytest.mark.nats
async def test_long_work_is_not_given_to_another(bus: Bus, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(received_module, "ACK_WAIT_S", 0.3)
    await expect_redelivery_after(bus, 2.0)
    await send_leases(bus, 1)

    class Slow(Recorder):
        async def __call__(self, lease: Lease) -> None:
            self.leases.append(lease.lease_id)
            await asyncio.sleep(2.4)
            self.stop.set()

    handler = Slow(until=1)
    await run(bus, handler, concurrency=2)
    assert handler.leases == [0]
    assert await keeps(bus, 0)


@pytest.mark.nats
async def test_single_message_is_handled_at_once_though_many_were_asked_for(bus: Bus):
    inbox = Inbox(bus, "TASKS", "rollout")
    taking = asyncio.create_task(inbox.take(64, timeout_s=20))
    await asyncio.sleep(0)
    await send_leases(bus, 1)
    began = time.monotonic()
    [raw] = await taking
    await raw.ack()
    for n in range(1, 20):  # also while the server still owes the rest of the first pull
        await send_leases(bus, 1, first=n)
        [raw] = await inbox.take(64, timeout_s=20)
        assert decode(raw.data, Lease).lease_id == n
        await raw.ack()
    assert time.monotonic() - began < 15


@pytest.mark.nats
async def test_idle_inbox_never_holds_more_than_it_asked_for(bus: Bus):
    inbox = Inbox(bus, "TASKS", "rollout")
    for _ in range(3):
        assert await inbox.take(2, timeout_s=consume_module.POLL_S * 0.9) == []
    await send_leases(bus, 20)
    taken = await inbox.take(2)
    while len(taken) < 2:
        taken += await inbox.take(2 - len(taken))
    found = await bus.js.consumer_info(bus.topology.stream("TASKS"), "rollout")
    assert found.num_ack_pending == 2
    assert found.num_pending == 18


# --- batches ---


Handler = Callable[[list[Trajectory]], Awaitable[None]]


async def send_trajectories(bus: Bus, count: int) -> None:
    messages: list[Message] = [make_trajectory(n, group_size=1) for n in range(count)]
    for message in messages:
        await bus.js.publish(bus.subject("trajectories", 0), encode(message))


async def run_batches(
    bus: Bus, handle: Handler, stop: asyncio.Event, *, limit: int, linger_s: float = 0.0
) -> None:
    inbox = Inbox(bus, "TRAJECTORIES", "shard-0")
    async with asyncio.timeout(60):
        await consume_batches(inbox, bus, Trajectory, handle, stop=stop, limit=limit, linger_s=linger_s)


@pytest.mark.nats
async def test_batches_hold_everything_once_and_are_bounded(bus: Bus):
    await send_trajectories(bus, 50)
    stop, seen, sizes = asyncio.Event(), [], []

    async def handle(batch: list[Trajectory]) -> None:
        seen.extend(t.lease_id for t in batch)
        sizes.append(len(batch))
        if len(seen) == 50:
            stop.set()

    await run_batches(bus, handle, stop, limit=16)
    assert seen == list(range(50))
    assert max(sizes) <= 16
    assert await keeps(bus, 0, "TRAJECTORIES")


@pytest.mark.nats
async def test_batch_that_lingers_gathers_what_comes_meanwhile(bus: Bus):
    stop, sizes = asyncio.Event(), []

    async def handle(batch: list[Trajectory]) -> None:
        sizes.append(len(batch))
        stop.set()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run_batches(bus, handle, stop, limit=10, linger_s=60.0))
        await send_trajectories(bus, 10)  # one after the other: without lingering the first comes alone
    assert sizes == [10]


async def unacked(bus: Bus, least: int) -> int:
    """Messages that the first shard has taken and not acked, once there are so many."""
    async with asyncio.timeout(60):
        while True:
            found = await bus.js.consumer_info(bus.topology.stream("TRAJECTORIES"), "shard-0")
            if (found.num_ack_pending or 0) >= least:
                return found.num_ack_pending or 0


@pytest.mark.nats
async def test_next_batches_are_taken_while_one_is_handled_but_not_without_bound(bus: Bus):
    await send_trajectories(bus, 50)
    stop, seen, most = asyncio.Event(), [], []

    async def handle(batch: list[Trajectory]) -> None:
        seen.extend(t.lease_id for t in batch)
        if not most:
            await unacked(bus, 8)  # beyond its own four
            await asyncio.sleep(2 * consume_module.POLL_S)
            most.append(await unacked(bus, 8))
        if len(seen) == 50:
            stop.set()

    await run_batches(bus, handle, stop, limit=4)
    assert seen == list(range(50))
    assert most[0] <= 3 * 4
    assert await keeps(bus, 0, "TRAJECTORIES")


@pytest.mark.nats
@pytest.mark.parametrize(("ahead_bytes", "far"), [(1, False), (1 << 20, True)])
async def test_messages_of_many_parts_are_taken_ahead_as_far_as_their_bytes_allow(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, ahead_bytes: int, far: bool
):
    monkeypatch.setattr(consume_module, "AHEAD_BYTES", ahead_bytes)
    publisher, subject = Publisher(bus, part_bytes=100), bus.subject("trajectories", 0)
    data = [encode(make_trajectory(n, group_size=1)) for n in range(30)]
    for n in range(30):
        await publisher.publish(subject, data[n], message_id=str(n))
    parts = -(-len(data[0]) // 100)
    stop, seen, taken = asyncio.Event(), [], []

    async def handle(batch: list[Trajectory]) -> None:
        seen.extend(t.lease_id for t in batch)
        if not taken:
            if far:
                taken.append(await unacked(bus, 6 * parts + 1))
            else:
                await asyncio.sleep(3 * consume_module.POLL_S)
                taken.append(await unacked(bus, 1))
        if len(seen) == 30:
            stop.set()

    await run_batches(bus, handle, stop, limit=2 * parts)
    assert seen == list(range(30))
    assert far or taken[0] <= 6 * parts  # in hand, decoded, and received: one pull each


@pytest.mark.nats
async def test_stop_handles_what_was_taken_and_leaves_the_rest(bus: Bus):
    await send_trajectories(bus, 50)
    stop, seen = asyncio.Event(), []

    async def handle(batch: list[Trajectory]) -> None:
        seen.extend(t.lease_id for t in batch)
        if not stop.is_set():
            await unacked(bus, 8)
        stop.set()

    await run_batches(bus, handle, stop, limit=4)
    assert seen == list(range(len(seen)))
    assert 8 <= len(seen) <= 12
    assert await keeps(bus, 50 - len(seen), "TRAJECTORIES")
    assert len(await Inbox(bus, "TRAJECTORIES", "shard-0").take(50, timeout_s=20)) > 0  # given back at once


@pytest.mark.nats
async def test_batch_returns_after_its_handler_crashed(bus: Bus):
    name = bus.topology.stream("TRAJECTORIES")
    config = dict(bus.topology.consumers(1))["TRAJECTORIES"]
    await bus.js.delete_consumer(name, "shard-0")
    await bus.js.add_consumer(name, config.evolve(ack_wait=0.2))
    await send_trajectories(bus, 5)
    stop, seen = asyncio.Event(), set[int]()

    async def crash(_: list[Trajectory]) -> None:
        raise RuntimeError("disk full")

    async def handle(batch: list[Trajectory]) -> None:
        seen.update(t.lease_id for t in batch)
        if len(seen) == 5:
            stop.set()

    with pytest.raises(RuntimeError, match="disk full"):
        await run_batches(bus, crash, stop, limit=5)
    assert await keeps(bus, 5, "TRAJECTORIES")
    await run_batches(bus, handle, stop, limit=5)
    assert seen == set(range(5))


@pytest.mark.nats
async def test_poison_in_a_batch_is_set_aside_and_the_batch_goes_on(bus: Bus):
    await bus.js.publish(bus.subject("trajectories", 0), b"garbage")
    await send_trajectories(bus, 1)
    stop, seen = asyncio.Event(), []

    async def handle(batch: list[Trajectory]) -> None:
        seen.extend(t.lease_id for t in batch)
        stop.set()

    await run_batches(bus, handle, stop, limit=5)
    assert seen == [0]
    assert await keeps(bus, 1, "DEAD")


# --- the server goes, the consumer goes ---


@pytest.mark.nats
async def test_loop_survives_a_kill_of_the_server(server: NatsServer, bus: Bus):
    await expect_redelivery_after(bus, 0.5)
    stop, first, seen = asyncio.Event(), asyncio.Event(), set()

    async def handle(lease: Lease) -> None:
        seen.add(lease.lease_id)
        first.set()

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        inbox = Inbox(bus, "TASKS", "rollout")
        tasks.create_task(consume(inbox, bus, Lease, handle, stop=stop, concurrency=2))
        await send_leases(bus, 1)
        await first.wait()
        await server.kill()
        await asyncio.sleep(0.5)  # an outage
        await server.start()
        await send_leases(bus, 5, first=1)
        assert await keeps(bus, 0)
        stop.set()
    assert seen == set(range(6))


@pytest.mark.nats
async def test_loop_that_is_stopped_while_the_server_is_away_ends_quickly(server: NatsServer, bus: Bus):
    await send_leases(bus, 2)
    handler = Recorder(until=3)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(run(bus, handler))
        assert await keeps(bus, 0)
        await server.kill()
        handler.stop.set()
    assert handler.leases == [0, 1]


@pytest.mark.nats
async def test_long_outage_does_not_pile_up_requests(server: NatsServer, bus: Bus):
    await send_leases(bus, 20)
    inbox = Inbox(bus, "TASKS", "rollout")
    [raw] = await inbox.take(1, 20.0)
    await server.kill()
    for _ in range(8):
        assert await inbox.take(2, timeout_s=0.05) == []
    await server.start()
    taken = [raw]
    async with asyncio.timeout(60):
        while len(taken) < 3:
            taken += await inbox.take(2)
    await bus.client.flush()
    found = await bus.js.consumer_info(bus.topology.stream("TASKS"), "rollout")
    assert found.num_ack_pending <= 4


@pytest.mark.nats
@pytest.mark.parametrize("idle_before", [False, True])
async def test_deleted_consumer_ends_the_loop_with_its_name(bus: Bus, idle_before: bool):
    name = bus.topology.stream("TASKS")
    inbox = Inbox(bus, "TASKS", "rollout")
    if idle_before:  # the pull is outstanding while the consumer goes
        taking = asyncio.create_task(inbox.take(1, timeout_s=60))
        while not (await bus.js.consumer_info(name, "rollout")).num_waiting:
            pass
        await bus.js.delete_consumer(name, "rollout")
    else:
        await bus.js.delete_consumer(name, "rollout")
        taking = asyncio.create_task(inbox.take(1, timeout_s=60))
    began = time.monotonic()
    with pytest.raises(BusError, match=r"test-TASKS has no consumer rollout .*restart the run's storage"):
        await taking
    assert time.monotonic() - began < 30


@pytest.mark.nats
async def test_deleted_stream_ends_the_loop_and_a_new_one_is_read_again(bus: Bus):
    name = bus.topology.stream("TASKS")
    inbox = Inbox(bus, "TASKS", "rollout")
    await bus.js.delete_stream(name)
    with pytest.raises(BusError, match="has no consumer rollout"):
        await inbox.take(1, timeout_s=10)
    await bus.js.add_stream(next(config for config in bus.topology.streams(2) if config.name == name))
    await bus.js.add_consumer(name, ConsumerConfig(durable_name="rollout", ack_policy="explicit"))
    await send_leases(bus, 1)
    assert len(await inbox.take(1, timeout_s=20)) == 1


@pytest.mark.nats
async def test_closed_connection_ends_the_loop(connect: Connect, bus: Bus):
    async with connect("short") as short:
        inbox = Inbox(short, "TASKS", "rollout")
    with pytest.raises(BusError, match="connection to the bus was closed"):
        await inbox.take(1)
