import asyncio
import random
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import nats
import nats.errors
import psutil
import pytest

from bus.waiting import cancelled
from launch.services import write_check
from soak import servers
from soak.bus_faults import kill_leader
from soak.disk import fill, small_disk
from soak.faults import Target, send_signal
from soak.run_faults import kill_after_ack
from soak.servers import BusServers, Server
from tests.storage.serving import until


async def test_a_server_that_ends_gets_no_signal(tmp_path, monkeypatch):
    useless = asyncio.Event()
    monkeypatch.setattr(servers, "until_it_cannot_store", lambda _: useless.wait())
    monkeypatch.setattr(servers, "until_a_stream_breaks", lambda _: asyncio.Event().wait())
    server = Server(tmp_path, servers.free_port(servers.HOST), None)
    keeping = asyncio.create_task(server.keep())
    try:
        await until(lambda: server.pid is not None)
        server.up.clear()
        ending = asyncio.Event()
        stop = server._nats.stop

        async def stop_slowly() -> None:
            stopping = asyncio.create_task(stop())
            await asyncio.sleep(0)
            ending.set()
            await stopping

        monkeypatch.setattr(server._nats, "stop", stop_slowly)
        useless.set()
        await ending.wait()
        assert not server.down.is_set()
        send_signal(server, 0)
        await server.down.wait()
        assert server.pid is None
    finally:
        await cancelled(keeping)


@pytest.mark.slow
async def test_a_lone_server_starts_again_where_one_stream_stores_no_more(tmp_path, monkeypatch):
    look, found = write_check._broken_streams, []
    monkeypatch.setattr(write_check, "_broken_streams", lambda url: found.append(look(url)) or found[-1])
    server = Server(tmp_path, servers.free_port(servers.HOST), None)
    keeping = asyncio.create_task(server.keep())
    try:
        await until(lambda: server.pid is not None)
        client = await nats.connect(server._nats.url, connect_timeout=60)
        js = client.jetstream(timeout=5)
        await js.add_stream(name="KEPT", subjects=["kept"])
        await until(lambda: [] in found)  # what was never well counts for nothing
        process = psutil.Process(server.pid)
        _, most = process.rlimit(psutil.RLIMIT_FSIZE)
        process.rlimit(psutil.RLIMIT_FSIZE, (0, most))
        with pytest.raises(nats.errors.Error):
            await js.publish("kept", b"1", timeout=1)
        process.rlimit(psutil.RLIMIT_FSIZE, (most, most))  # the probe's own stream stores again

        async def stored() -> bool:
            with suppress(nats.errors.Error, OSError):
                return bool(await js.publish("kept", b"2", timeout=1))
            return False

        await until(stored)
        assert server.restarts == 1
        await client.close()
    finally:
        await cancelled(keeping)


async def test_faults_strike_at_the_stream_of_any_shard():
    asked: set[str] = set()

    async def on_ack(run: str, stream: str, *_: object) -> None:
        asked.add(stream)

    async def leader(run: str, stream: str) -> None:
        asked.add(f"leader of {stream}")

    target = SimpleNamespace(
        local=SimpleNamespace(run=SimpleNamespace(name="x")), shards=2, random=random.Random(0),
        servers=SimpleNamespace(on_ack=on_ack, leader=leader, lock=asyncio.Lock()),
    )  # fmt: skip
    target.stream = partial(Target.stream, target)
    for _ in range(20):
        await kill_after_ack(target)
        assert not await kill_leader(target)
    streams = {"TRAJECTORIES", "TRAJECTORIES-1"}
    assert asked == streams | {f"leader of {stream}" for stream in streams}


@pytest.mark.nightly
async def test_a_cluster_whose_disk_was_full_stores_again(tmp_path):
    with small_disk(tmp_path / "disk") as mounted:
        if not mounted:
            pytest.skip("this host allows no loop mount")
        bus = BusServers(tmp_path / "disk", 3)
        async with bus.running():
            client = await nats.connect(bus.url.split(","), connect_timeout=60, allow_reconnect=True)
            js = client.jetstream(timeout=5)

            async def stored() -> bool:
                with suppress(nats.errors.Error, OSError):
                    return bool(await js.publish("kept", bytes(1 << 19)))
                return False

            async def made() -> bool:
                with suppress(nats.errors.Error, OSError):
                    return bool(await js.add_stream(name="KEPT", subjects=["kept"], num_replicas=3))
                return False

            await until(made, seconds=60)
            ballast = await asyncio.to_thread(fill, tmp_path / "disk")

            async def off() -> bool:
                await stored()
                logs = [(one.directory / "nats.log").read_bytes() for one in bus.servers]
                return sum(b"will be DISABLED" in log for log in logs) > 1

            await until(off, seconds=60)
            ballast.unlink()
            await until(stored, seconds=120)
            await client.close()
