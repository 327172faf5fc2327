"""Streams and consumers of a run."""

import asyncio

import pytest

from bus.config import BusConfig, StreamsConfig
from bus.connection import Bus
from bus.errors import BusError, ConfigError
from bus.requests import Done
from bus.server.nats_server import NatsServer
from bus.streams.blob_store import get_blob, put_blob, put_only_blob
from bus.streams.publish import Publisher
from bus.topology import MIB, Topology, by_shard, ensure, shard_of, stream_of

STREAMS = {"TASKS", "TRAJECTORIES", "TRAJECTORIES-1", "OUTCOMES", "WEIGHTS", "FILES", "EVENTS", "DEAD"}


@pytest.mark.nats
async def test_ensure_creates_what_is_missing_and_says_which_streams_were_new(
    bus: Bus, capsys: pytest.CaptureFixture
):
    assert await ensure(bus.js, bus.topology, shards=2) == set()
    await bus.create_keys()
    assert "stream_updated" not in capsys.readouterr().out, "the fixture makes those that ensure does"
    await bus.js.delete_stream(bus.topology.stream("TASKS"))
    assert await ensure(bus.js, bus.topology, shards=2) == {"TASKS"}
    assert await bus.js.consumer_info(bus.topology.stream("TASKS"), "evaluation")


@pytest.mark.nats
async def test_a_stream_whose_directory_the_server_has_yet_to_remove_is_created(bus: Bus, server: NatsServer):
    left = server.directory / "jetstream" / "jetstream" / "$G" / "streams" / "other-TASKS"
    left.write_text("not removed yet")  # until the first creation fails
    assert "TASKS" in await ensure(bus.js, Topology("other", bus.topology.config), shards=2)


@pytest.mark.nats
async def test_ensure_keeps_what_streams_and_consumers_hold(bus: Bus):
    await bus.js.publish(bus.subject("trajectories", 1), b"kept")
    await ensure(bus.js, bus.topology, shards=3)  # a shard more
    found = await bus.js.consumer_info(bus.topology.stream("TRAJECTORIES-1"), "shard-1")
    assert found.num_pending == 1
    assert await bus.js.consumer_info(bus.topology.stream("TRAJECTORIES-2"), "shard-2")


@pytest.mark.nats
async def test_each_shard_has_a_stream_which_fills_alone(bus: Bus):
    """The bound is of all of them together; a publisher to a full one waits, and others do not."""
    sizes = [config.max_bytes for config in bus.topology.streams(2) if "TRAJECTORIES" in str(config.name)]
    assert sizes == [512 * MIB, 512 * MIB]
    config = (await bus.js.stream_info(bus.topology.stream("TRAJECTORIES-1"))).config
    await bus.js.update_stream(config.evolve(max_bytes=MIB))
    publisher = Publisher(bus)
    waiting = [
        asyncio.create_task(
            publisher.publish(bus.subject("trajectories", 1), bytes(MIB // 2), message_id=name)
        )
        for name in ("a", "b")
    ]
    async with asyncio.timeout(60):
        while not publisher.counts.refused_full:  # noqa: ASYNC110 - it has no event for it
            await asyncio.sleep(0.01)
        await publisher.publish(bus.subject("trajectories", 0), bytes(MIB // 2), message_id="other")
        await bus.js.purge_stream(bus.topology.stream("TRAJECTORIES-1"))
        await asyncio.gather(*waiting)


def test_shards_above_sixteen_share_the_streams():
    """Else a secured bus, whose permissions name each stream, would have to know the number of shards."""
    topology = Topology("test")
    streams = {config.name: config for config in topology.streams(33) if "TRAJECTORIES" in str(config.name)}
    assert len(streams) == 16
    assert streams["test-TRAJECTORIES"].subjects == [topology.subject("trajectories", n) for n in (0, 16, 32)]
    assert streams["test-TRAJECTORIES-15"].subjects == [topology.subject("trajectories", n) for n in (15, 31)]
    assert streams["test-TRAJECTORIES-15"].max_bytes == 64 * MIB
    assert stream_of("sluice.test.trajectories.31") == "TRAJECTORIES-15"
    for name, consumer in topology.consumers(33):
        if str(consumer.durable_name).startswith("shard-"):
            assert consumer.filter_subject in (streams[topology.stream(name)].subjects or ())


@pytest.mark.nats
async def test_runs_on_one_server_do_not_meet(bus_server: NatsServer, bus: Bus):
    async with Bus.connect(BusConfig(url=bus_server.url), "other", name="t") as other:
        assert await ensure(other.js, other.topology, shards=2) == STREAMS
        await other.js.publish(other.subject("tasks", "rollout"), b"x")
    assert (await bus.js.stream_info(bus.topology.stream("TASKS"))).state.messages == 0


@pytest.mark.nats
async def test_server_without_jetstream_is_refused_by_name_of_the_run(tmp_path):
    class Bare(NatsServer):
        def _config(self) -> str:
            return super()._config().split("jetstream {")[0]

    async with Bare(tmp_path) as server, Bus.connect(BusConfig(url=server.url), "plain", name="t") as bus:
        with pytest.raises(BusError, match="the bus refuses the streams of run 'plain'"):
            await ensure(bus.js, bus.topology, shards=1)
        with pytest.raises(BusError, match="cannot create the keys of run 'plain'"):
            await bus.create_keys()


@pytest.mark.nats
async def test_disk_too_small_for_the_streams_is_refused_with_their_size_and_the_remedy(tmp_path):
    class Small(NatsServer):
        def _config(self) -> str:
            return super()._config().replace("jetstream {", "jetstream { max_file_store: 100MB,")

    async with Small(tmp_path) as server, Bus.connect(BusConfig(url=server.url), "large", name="t") as bus:
        with pytest.raises(ConfigError, match=r"grow to 4\d\d\d MiB, large-WEIGHTS alone to 2048.*free some"):
            await ensure(bus.js, bus.topology, shards=1)


@pytest.mark.nats
async def test_a_thousand_actors_may_wait_on_one_queue(bus: Bus):
    stream, inbox = bus.topology.stream("TASKS"), bus.client.new_inbox()
    await bus.client.subscribe(f"{inbox}.*")
    for n in range(1000):
        request = b'{"batch": 1, "expires": 30000000000}'
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.rollout"
        await bus.client.publish(subject, request, reply=f"{inbox}.{n}")
    async with asyncio.timeout(60):
        while (await bus.js.consumer_info(stream, "rollout")).num_waiting < 1000:
            pass


def test_every_lease_has_one_shard():
    assert [shard_of(lease, 3) for lease in range(6)] == [0, 1, 2, 0, 1, 2]
    assert by_shard([5, 0, 3, 1, 4], 3) == {2: [5], 0: [0, 3], 1: [1, 4]}


@pytest.mark.nats
async def test_a_larger_size_that_an_operator_gave_a_stream_stays_and_a_smaller_one_does_not(bus: Bus):
    name, sizes = bus.topology.stream("TASKS"), StreamsConfig(tasks_mib=64)
    for given, kept in ((512 * MIB, 512 * MIB), (-1, -1), (32 * MIB, 64 * MIB)):
        config = (await bus.js.stream_info(name)).config
        await bus.js.update_stream(config.evolve(max_bytes=given))
        await ensure(bus.js, Topology("test", sizes), shards=2)
        assert (await bus.js.stream_info(name)).config.max_bytes == kept


@pytest.mark.nats
async def test_keys_whose_stream_an_operator_has_edited_are_used_as_they_are(bus: Bus):
    await bus.put("k", Done())
    config = (await bus.js.stream_info("KV_sluice-test")).config
    await bus.js.update_stream(config.evolve(max_bytes=64 * MIB, description="watched"))
    again = Bus(bus.client, "test")
    await again.create_keys()
    assert await again.get("k", Done) is not None
    assert (await bus.js.stream_info("KV_sluice-test")).config.description == "watched"


@pytest.mark.nats
async def test_neither_weights_nor_metrics_push_out_files_rewards_and_rejections(bus: Bus):
    for name in ("WEIGHTS", "EVENTS"):
        config = (await bus.js.stream_info(bus.topology.stream(name))).config
        await bus.js.update_stream(config.evolve(max_bytes=MIB))
    publisher = Publisher(bus)
    model = await put_blob(bus, publisher, b"config and tokenizer", "model")
    for outcome in ("rejected", "rewards.0"):
        await publisher.publish(bus.subject("outcomes", outcome), b"kept", message_id=outcome)
    for n in range(3):
        await put_blob(bus, publisher, bytes(MIB // 2), "policy", n, stream="weights")
        await publisher.publish(bus.subject("events", "metrics"), bytes(MIB // 2), message_id=f"metrics-{n}")
    assert (await bus.js.stream_info("test-WEIGHTS")).state.messages < 3
    assert (await bus.js.stream_info("test-EVENTS")).state.messages < 3
    assert await get_blob(bus, model) == b"config and tokenizer"
    assert (await bus.js.stream_info("test-OUTCOMES")).state.messages == 2


@pytest.mark.nats
async def test_files_of_a_kind_replace_those_before_them(bus: Bus):
    publisher = Publisher(bus)
    old = await put_only_blob(bus, publisher, b"old", "model")
    other = await put_only_blob(bus, publisher, b"prompts", "heldout")
    new = await put_only_blob(bus, publisher, b"new", "model")
    assert await get_blob(bus, new) == b"new"
    assert await get_blob(bus, other) == b"prompts"
    with pytest.raises(BusError, match="not on the bus"):
        await get_blob(bus, old)
