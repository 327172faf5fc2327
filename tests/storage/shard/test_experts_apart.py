"""Routed experts on their way from actors to shards, which are not to pass the bus, and never get lost."""

import asyncio
import os
import socket
import time
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import pytest
from nats.js.api import ConsumerInfo
from structlog.testing import capture_logs

from actors.episodes.episode import AgentTrajectory, Episode
from actors.rollouts.group import Group
from actors.rollouts.leases import PolicyLeases
from bus.blobs import sha256_of
from bus.codec import decode, encode
from bus.connection import Bus
from bus.errors import BusError, UnreadableGroupsError
from bus.messages import GroupRejected
from bus.requests import GroupRef, ReadRequest
from bus.streams import consume
from bus.streams.consume import Inbox, consume_batches
from bus.trajectory import KeptTurn, TrajectoryBatch, Turn
from bus.weight_requests import ExpertsPlace, ExpertsPlaceAsked
from storage.client import expert_reader, expert_sender
from storage.client.expert_sender import ExpertSender
from storage.client.reader import ReplayReader
from storage.settings.weights_transport import ServerConfig
from storage.shard.routed_experts import DIRECTORY, ExpertFiles, ExpertServer
from storage.store.replay import ReplayStore
from storage.weights.blob_http import shown_access
from tests.bus.security.secured import by_role, make_streams, secured_bus
from tests.factories import make_lease, make_trajectory, make_turn
from tests.storage.serving import dead_letters, has, make_shard, running, until

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]
TOKENS, LAYERS, PER_TOKEN = 3000, 48, 8  # Qwen3-30B-A3B: 384 bytes a token
MANY = 1 << 30


def experts(seed: int) -> np.ndarray:
    shape = (TOKENS - 1, LAYERS, PER_TOKEN)
    return np.random.default_rng(seed).integers(0, 128, shape, np.uint8)


def batch(lease_id: int, sample: int, seed: int | None = None) -> TrajectoryBatch:
    """A sample's message, as an actor makes it."""
    routed = {"moe_layers": LAYERS, "experts_per_token": PER_TOKEN}
    plain = make_trajectory(lease_id, sample, tokens=TOKENS)
    one = replace(
        plain, routed_experts=experts(lease_id + sample if seed is None else seed).tobytes(), **routed
    )
    return TrajectoryBatch.of([one])


def turn_with_experts(lease_id: int) -> KeptTurn:
    routed = {"moe_layers": LAYERS, "experts_per_token": PER_TOKEN}
    return replace(make_turn(lease_id, tokens=TOKENS), routed_experts=experts(7).tobytes(), **routed)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who answers late passes the bus: what must come to pass here may take longer on a loaded machine."""
    for module in (expert_reader, expert_sender):
        monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 20.0)


@pytest.fixture
def store(tmp_path):
    with closing(ReplayStore.open(tmp_path / "replay")) as opened:
        yield opened


@asynccontextmanager
async def taking(bus: Bus, store: ReplayStore, most_bytes: int = MANY, **config: object):
    """The server of shard 0."""
    server = ExpertServer(bus, {0: store}, ServerConfig(**config), most_bytes)
    async with server.serving():
        yield server


def files(store: ReplayStore) -> list[Path]:
    directory = store.directory / DIRECTORY
    return sorted(directory.iterdir()) if directory.is_dir() else []


async def stream_bytes(bus: Bus) -> int:
    return int((await bus.js.stream_info(bus.topology.stream("TRAJECTORIES"))).state.bytes)


async def publish(bus: Bus, message: TrajectoryBatch) -> None:
    await bus.js.publish(bus.subject("trajectories", 0), encode(message))


async def place(bus: Bus) -> ExpertsPlace:
    return await bus.request(
        bus.subject("rpc", "experts", 0), ExpertsPlaceAsked(), ExpertsPlace, timeout_s=10
    )


def an_actors(bus: Bus) -> PolicyLeases:
    return PolicyLeases(bus, None, shards=2, actor="a", counts=Counter())


async def test_an_actors_experts_go_to_the_shard_and_not_through_the_bus(bus, store):
    """Those of turns too. What the actor sends is stored when it has ended, by a shard that begins later."""
    whole = [batch(0, sample).trajectories[0] for sample in range(2)]
    group = Group(make_lease(0), 1, "a")
    for sample, t in enumerate(whole):
        part = AgentTrajectory(
            agent="solver", token_ids=t.token_ids, loss_mask=t.loss_mask,
            behaviour_logprobs=t.behaviour_logprobs, policy_versions=t.policy_versions,
            turns=(Turn(2, TOKENS, "stop"),), end="completed", reward=1.0, routed_experts=t.experts,
        )  # fmt: skip
        group.episodes[sample] = Episode((part,))
    turn = turn_with_experts(2)
    async with taking(bus, store):
        actor = an_actors(bus)
        await actor.publish(group)
        assert await actor.keep_turns(make_lease(2), [turn])
        assert 0 < await stream_bytes(bus) < 40 * 3 * TOKENS, "more than ids, log-probs, versions and mask"
        assert len(files(store)) == 3
    async with running(make_shard(bus, store, 0).run):
        await until(lambda: store.completed == [0])
        await has(bus, "TRAJECTORIES", 0)
    for sample, found in enumerate(store.read([0])):
        np.testing.assert_array_equal(found.experts, experts(sample))
    [kept] = store.turns.of(2)
    assert isinstance(kept, KeptTurn)
    assert kept.routed_experts == turn.routed_experts
    assert not files(store), "they are stored"
    await has(bus, "DEAD", 0)


async def test_what_is_delivered_again_after_it_was_stored_is_dropped(bus, store):
    turns = TrajectoryBatch(trajectories=(), turns=(turn_with_experts(2),))
    async with taking(bus, store):
        lights = [await ExpertSender(bus).lightened(0, one) for one in (batch(0, 0), turns)]
    async with running(make_shard(bus, store, 0).run):
        for light in lights:
            await publish(bus, light)
        await until(lambda: store.trajectories == 1 and store.turns.number_of(2) == 1)
        for light in lights:
            await publish(bus, light)
        await has(bus, "TRAJECTORIES", 0)
    assert (store.trajectories, store.turns.counts["stored"]) == (1, 1)
    await has(bus, "DEAD", 0)


async def test_two_messages_with_equal_experts_are_stored_one_after_the_other(bus, store):
    """Short answers to a long prompt are often the same, and so is where their tokens went."""
    equal = [batch(0, 0), batch(0, 1, seed=0)]
    async with taking(bus, store):
        lights = [await ExpertSender(bus).lightened(0, one) for one in equal]
    async with running(make_shard(bus, store, 0).run):
        for stored, light in enumerate(lights, 1):
            await publish(bus, light)
            await has(bus, "TRAJECTORIES", 0)
            assert store.trajectories == stored
    for found in store.read([0]):
        np.testing.assert_array_equal(found.experts, experts(0))
    await has(bus, "DEAD", 0)


@pytest.mark.parametrize("size", [0, 300])
async def test_a_digest_of_another_size_names_no_file_and_is_set_aside(bus, store, size):
    """Those that are looked for are a directory, or have too long a name."""
    async with taking(bus, store):
        light = await ExpertSender(bus).lightened(0, batch(0, 0))
    forged = replace(light, apart=replace(light.apart, digest=bytes(size)))
    async with running(make_shard(bus, store, 0).run):
        await publish(bus, forged)
        await has(bus, "TRAJECTORIES", 0)
    [letter] = await dead_letters(bus)
    assert f"a digest of {size} bytes" in letter.reason


async def test_messages_that_wait_while_a_shard_is_found_away_are_not_tried(bus, monkeypatch):
    sender, tried = ExpertSender(bus), []

    async def away(*_: object) -> None:
        tried.append(1)
        await asyncio.sleep(0)
        raise BusError("away")

    monkeypatch.setattr(sender, "_send", away)
    given = batch(0, 0)
    assert await asyncio.gather(*(sender.lightened(0, given) for _ in range(12))) == [given] * 12
    assert len(tried) == expert_sender.AT_ONCE


async def test_a_trajectory_whose_experts_are_gone_is_set_aside_by_name_and_its_lease_refunded(bus, store):
    """So is one whose file a power cut has torn, and one with experts of another length."""
    async with taking(bus, store):
        sender = ExpertSender(bus)
        lights = [await sender.lightened(0, batch(lease_id, 0)) for lease_id in (0, 2, 4)]
    gone, torn = (store.directory / DIRECTORY / one.apart.digest.hex() for one in lights[:2])
    gone.unlink()
    with torn.open("r+b") as file:
        file.truncate(100)
    lights[2] = replace(lights[2], apart=replace(lights[2].apart, experts_per_token=5))
    for light in lights:
        await publish(bus, light)
    async with running(make_shard(bus, store, 0).run):
        await has(bus, "TRAJECTORIES", 0)
    letters = await dead_letters(bus)
    assert [letter.reason[:9] for letter in letters[:2]] == ["lease 0: ", "lease 2: "]
    assert "bytes of routed experts for 3000 tokens" in letters[2].reason
    assert {letter.actor for letter in letters} == {"test"}
    await has(bus, "OUTCOMES", 3)
    stream = bus.topology.stream("OUTCOMES")
    refunds = [decode((await bus.js.get_msg(stream, n)).data, GroupRejected) for n in (1, 2, 3)]
    assert [refund.lease_id for refund in refunds] == [0, 2, 4]
    assert store.trajectories == 0


@pytest.mark.parametrize("why", ["nobody_takes_them", "full", "not_reachable"])
async def test_experts_that_the_shard_does_not_take_pass_the_bus(bus, store, why, monkeypatch):
    sender, given = ExpertSender(bus), batch(0, 0)
    room = 100 if why == "full" else MANY
    config = {"advertise": "http://127.0.0.1:1"} if why == "not_reachable" else {}
    with capture_logs() as said:
        if why == "nobody_takes_them":  # as in older builds
            assert await sender.lightened(0, given) is given
        else:
            async with taking(bus, store, room, **config):
                assert await sender.lightened(0, given) is given
                assert await sender.lightened(0, given) is given, "it is not tried again at once"
    [line] = [line for line in said if line["event"] == "routed_experts_pass_the_bus"]
    assert line["log_level"] == "warning"
    assert files(store) == []


async def test_a_shards_process_that_begins_again_is_found_and_few_experts_stay_in_the_message(bus, store):
    sender = ExpertSender(bus)
    urls = set()
    for sample in range(2):
        async with taking(bus, store), aiohttp.ClientSession() as session:
            assert (await sender.lightened(0, batch(0, sample))).apart is not None
            url = urlsplit((await place(bus)).url)
            for earlier in urls:  # this may be another run's server, at the port of one that ended
                async with session.put(f"http://{url.netloc}{earlier.path}0-{'0' * 64}", data=b"x") as answer:
                    assert answer.status == 404
            urls.add(url)
            few = replace(make_trajectory(2, 0, tokens=9), routed_experts=bytes(8), moe_layers=1,
                          experts_per_token=1)  # fmt: skip
            short = TrajectoryBatch.of([few])
            assert await sender.lightened(0, short) is short
    assert len(urls) == 2
    assert len(files(store)) == 2


async def test_other_bytes_than_the_digest_says_and_other_names_are_not_taken(bus, store):
    name = f"0-{sha256_of([b'experts']).hex()}"
    async with taking(bus, store), aiohttp.ClientSession() as session:
        url = (await place(bus)).url
        for path, data, status in (
            (name, b"other", 422), ("0-..", b"x", 404), ("7" + name[1:], b"experts", 404),
            (name, b"experts", 201), (name, b"experts", 201),
        ):  # fmt: skip
            async with session.put(f"{url}{path}", data=data) as answer:
                assert answer.status == status, path
        asked = urlsplit(url)
        reader, writer = await asyncio.open_connection("127.0.0.1", asked.port)
        cut = f"0-{sha256_of([b'whole']).hex()}"
        writer.write(f"PUT {asked.path}{cut} HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nwho".encode())
        await writer.drain()
        await until(lambda: len(files(store)) == 2)
        writer.close()  # the actor ends
        await until(lambda: len(files(store)) == 1)
        assert await reader.read() == b""
    assert [(path.name, path.read_bytes()) for path in files(store)] == [(name[2:], b"experts")]


def test_a_full_disk_is_left_without_the_beginning_of_a_file(store):
    incoming = ExpertFiles(store.directory).incoming("0" * 64, 1 << 20)
    incoming._file.close()
    with Path("/dev/full").open("wb") as incoming._file:
        incoming.add(b"too much")
        with pytest.raises(OSError, match="No space left"):
            incoming.close()
    assert not files(store)


async def test_files_that_no_message_names_go_when_the_shard_has_taken_all(bus, store, monkeypatch):
    monkeypatch.setattr("storage.shard.routed_experts.LOOK_S", 0.02)
    monkeypatch.setattr(bus, "patience_s", 5.0)
    async with taking(bus, store):
        sender = ExpertSender(bus)
        left, waiting = [await sender.lightened(0, batch(0, sample)) for sample in range(2)]
    old = store.directory / DIRECTORY / left.apart.digest.hex()
    for path in files(store):
        os.utime(path, (time.time() - 60, time.time() - 60))
    await publish(bus, waiting)
    tended, looks, consumer_info = ExpertFiles(store.directory), [], bus.js.consumer_info

    async def look(*names: str) -> ConsumerInfo:
        looks.append(names)
        return (await consumer_info(*names)).evolve(num_pending=1)  # as under load, where none is the last

    monkeypatch.setattr(bus.js, "consumer_info", look)
    async with running(lambda stop: tended.tend(bus, 0, stop)):
        await until(lambda: len(looks) > 1)
        assert len(files(store)) == 2, "a message waits, and may name them"
    async with running(make_shard(bus, store, 0).run):
        await until(lambda: store.trajectories == 1)
        await until(lambda: not old.exists())


async def test_a_batch_ends_with_the_message_that_brings_it_to_its_bytes(bus, monkeypatch):
    monkeypatch.setattr(consume, "AHEAD_BYTES", 1 << 20)
    for lease_id in range(0, 8, 2):
        await publish(bus, batch(lease_id, 0).without_experts(bytes(32)))
    sizes: list[int] = []

    async def handle(batches: list[TrajectoryBatch]) -> None:
        sizes.append(len(batches))

    inbox = Inbox(bus, "TRAJECTORIES", "shard-0")
    async with running(
        lambda stop: consume_batches(
            inbox, bus, TrajectoryBatch, handle, stop=stop, limit=64,
            apart_bytes=lambda batch: batch.apart_bytes,
        )
    ):  # fmt: skip
        await until(lambda: sum(sizes) == 4)
    assert sizes == [1, 1, 1, 1]


async def read(bus: Bus, store: ReplayStore, lease_id: int) -> list[dict[str, object]]:
    """Read a group as a learner on another host does; what was logged meanwhile."""
    reader = ReplayReader(bus, "a", read="bus")
    with capture_logs() as said:
        [found] = await reader.fetch((GroupRef(lease_id=lease_id, shard=0),))
    assert [encode(one) for one in found] == [encode(one) for one in store.read([lease_id])]
    return said


async def test_a_learner_elsewhere_gets_experts_from_the_shard_and_not_through_the_bus(bus, store):
    store.append([batch(0, sample).trajectories[0] for sample in range(2)])
    store.append([make_trajectory(2, sample) for sample in range(2)])
    shard = make_shard(bus, store, 0)
    async with running(shard.run):
        await asyncio.wait_for(shard.serving.wait(), 20)
        async with taking(bus, store) as server:
            asked = ReadRequest(lease_ids=(0, 2), apart=True)
            subject = bus.subject("rpc", "read", 0)
            answers = await bus.request_many(subject, asked, TrajectoryBatch, timeout_s=20)
            assert [one.apart_bytes for one in answers] == [2 * experts(0).nbytes, 0]
            assert not [line for line in await read(bus, store, 0) if line["log_level"] == "warning"]
            assert server._server.sent_bytes == 2 * experts(0).nbytes
            await read(bus, store, 2)
        said = await read(bus, store, 0)
    assert [line["event"] for line in said] == ["routed_experts_pass_the_bus"], "nobody serves them any more"


async def test_a_group_that_is_retired_between_answer_and_fetch_is_no_fault_of_its_shards_server(
    bus, store, monkeypatch
):
    for lease_id in (0, 2):
        store.append([batch(lease_id, 0).trajectories[0], batch(lease_id, 1).trajectories[0]])
    reader, whole = ReplayReader(bus, "a", read="bus"), expert_reader.ExpertReader.whole

    async def whole_of_retired(*asked: object) -> list[TrajectoryBatch]:
        await asyncio.to_thread(store.retire, store.entries[0], None)
        return await whole(*asked)

    shard = make_shard(bus, store, 0)
    async with running(shard.run), taking(bus, store) as server:
        await asyncio.wait_for(shard.serving.wait(), 20)
        with monkeypatch.context() as patched:
            patched.setattr(expert_reader.ExpertReader, "whole", whole_of_retired)
            with pytest.raises(UnreadableGroupsError):
                await reader.fetch((GroupRef(lease_id=0, shard=0),))
        before = server._server.sent_bytes
        await reader.fetch((GroupRef(lease_id=2, shard=0),))
        assert server._server.sent_bytes - before == 2 * experts(0).nbytes


async def test_a_shards_server_that_hangs_is_named_and_waited_for_no_longer_than_is_stated(bus, monkeypatch):
    monkeypatch.setattr(expert_sender, "STALLED_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as hung, capture_logs() as said:  # connects, reads nothing
        url = f"http://127.0.0.1:{hung.getsockname()[1]}/"

        async def answer(_: ExpertsPlaceAsked) -> list[ExpertsPlace]:
            return [ExpertsPlace(url=url)]

        await bus.serve(bus.subject("rpc", "experts", 0), ExpertsPlaceAsked, answer)
        async with asyncio.timeout(20):  # aiohttp's limit is 30 s
            assert await an_actors(bus).keep_turns(make_lease(2), [turn_with_experts(2)])
    [line] = [line for line in said if line["event"] == "routed_experts_pass_the_bus"]
    assert line["shard"] == 0
    assert line["reason"].startswith(url)
    assert line["reason"].endswith("the server took nothing for 0.2 s, or too little")


@pytest.mark.slow
async def test_on_a_secured_bus_only_actors_send_experts_and_only_learners_fetch_them(tmp_path):
    async with AsyncExitStack() as stack:
        secure, _ = await stack.enter_async_context(secured_bus(tmp_path, "mine"))
        await make_streams(by_role(secure))
        roles = ("storage", "actor", "judge", "learner")
        storage, actor, judge, learner = [
            await stack.enter_async_context(by_role(secure)(role)) for role in roles
        ]
        store = stack.enter_context(closing(ReplayStore.open(tmp_path / "replay")))
        store.append([batch(0, sample).trajectories[0] for sample in range(2)])
        await stack.enter_async_context(running(make_shard(storage, store, 0).run))
        await stack.enter_async_context(taking(storage, store))
        await storage.client.flush()  # the server knows who serves before others ask
        light = await ExpertSender(actor).lightened(0, batch(2, 0))
        assert light.apart is not None
        found = await place(actor)
        assert found.url.startswith("https://")
        async with aiohttp.ClientSession() as session:
            async with session.put(f"{found.url}0-{'0' * 64}", data=b"x", ssl=False) as answer:
                assert answer.status == 401
            stored = f"{found.url}0-0-{2 * experts(0).nbytes}"
            async with session.get(stored, **shown_access(found.access)) as answer:
                assert answer.status == 404, "actors do not know how readers begin"
        for stranger, what in ((judge, "experts"), (actor, "stored_experts"), (learner, "experts")):
            subject = stranger.subject("rpc", what, 0)
            with pytest.raises(BusError):
                await stranger.request(subject, ExpertsPlaceAsked(), ExpertsPlace, timeout_s=0.5)
        # The refusals above may be told only now.
        assert "routed_experts_pass_the_bus" not in {line["event"] for line in await read(learner, store, 0)}
    assert len(files(store)) == 1
