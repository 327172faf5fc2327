"""An engine of two nodes on a real bus; a process that only waits stands for the ranks of the second node."""

import asyncio
import os
import re
import signal
import socket
from contextlib import asynccontextmanager

import psutil
import pytest

from actors.engines.fleet import engine_nodes
from actors.engines.fleet.engine_nodes import FollowingNode, LeadingNode
from actors.settings.engines import SglangEngineConfig
from bus.engine_nodes import EngineNode, node_key
from bus.errors import ConfigError, EngineError, EngineNodeLostError, leaves
from bus.server.nats_server import free_port

pytestmark = pytest.mark.nats
HEAD = f"head:{free_port('127.0.0.1')}"
STANDS_FOR_RANKS = "#!/bin/sh\necho $$ >> {pids}\nexec sleep 600\n"


@pytest.fixture(autouse=True)
def frequent_beats(monkeypatch):
    monkeypatch.setattr(engine_nodes, "BEAT_S", 0.05)
    monkeypatch.setattr(engine_nodes, "SILENCE_S", 1.0)


@pytest.fixture
def ranks(tmp_path):
    """The file with the id of each process that stood for the second node's ranks."""
    python, pids = tmp_path / "python", tmp_path / "pids"
    python.write_text(STANDS_FOR_RANKS.format(pids=pids))
    python.chmod(0o755)
    return pids


@pytest.fixture
def settings(tmp_path, ranks):
    def of_node(rank, **others):
        usual = {"update": "tensor", "server": {"tp_size": 2}, "python": ranks.with_name("python")}
        several = {"nodes": 2, "node_rank": rank, "rendezvous": HEAD, "start_timeout_s": 60.0}
        return SglangEngineConfig(**usual | several | others)

    return of_node


@asynccontextmanager
async def following(bus, config, model, tmp_path):
    """The second node while inside; what it raised is raised in the end."""
    stop = asyncio.Event()
    node = FollowingNode(bus, config, model, tmp_path / "node-1.log", first_gpu=0)
    running = asyncio.create_task(node.run(stop))
    try:
        yield running
    finally:
        stop.set()
        await running


async def started(pids, count):
    """The id of the process that was the last of so many to start."""
    async with asyncio.timeout(60):
        while not (pids.exists() and len(found := pids.read_text().split()) >= count):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return int(found[-1])


async def ended(pid):
    async with asyncio.timeout(60):
        while psutil.pid_exists(pid):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def led_until_lost(leader, ranks):
    lost = asyncio.Queue()
    async with leader.leading(), leader.watched(lost.put_nowait):
        await leader.start()
        os.kill(await started(ranks, 1), signal.SIGKILL)
        raise EngineError(await asyncio.wait_for(lost.get(), 60))  # as the fleet does


async def test_a_node_that_ends_is_named_and_all_begin_anew_together(
    bus, settings, ranks, model_dir, tmp_path
):
    lost = asyncio.Queue()
    async with following(bus, settings(1), model_dir, tmp_path):
        with pytest.raises(ExceptionGroup) as raised:
            await led_until_lost(LeadingNode(bus, settings(0)), ranks)
        [error] = leaves(raised.value)
        assert isinstance(error, EngineNodeLostError)
        assert re.fullmatch(r"node 1 \(.+\): it ended with signal SIGKILL: see .*node-1\.log", str(error))

        leader = LeadingNode(bus, settings(0))
        async with leader.leading(), leader.watched(lost.put_nowait):
            await leader.start()
            second = await started(ranks, 2)
        await ended(second)
        assert lost.empty()


async def test_nodes_say_for_whom_they_wait_and_not_for_ever(bus, settings, ranks, model_dir, tmp_path):
    leader = LeadingNode(bus, settings(0, start_timeout_s=0.2))
    with pytest.raises(ExceptionGroup) as raised:
        async with leader.leading():
            await leader.start()
    assert leader.starting == f"waiting for node 1 of the engine at {HEAD}"
    [error] = leaves(raised.value)
    assert not isinstance(error, EngineNodeLostError), "nobody is lost who never came"
    assert "with the same settings of actors.engine and --actors.engine.node-rank 1" in str(error)
    with pytest.raises(EngineError, match=rf"start_timeout_s=0\.2 for node 0 of the engine at {HEAD}"):
        async with following(bus, settings(1, start_timeout_s=0.2), model_dir, tmp_path) as running:
            await asyncio.wait({running}, timeout=60)
    assert not ranks.exists()


async def test_nodes_that_share_no_directory_are_refused(bus, settings, model_dir, tmp_path):
    apart = {"update": "disk", "weights_directory": tmp_path / "here"}
    leader = LeadingNode(bus, settings(0, **apart))
    async with leader.leading():
        [file] = (tmp_path / "here").iterdir()
        elsewhere = file.rename(tmp_path / "elsewhere")  # as on a host with another directory of this name
        with pytest.raises(ConfigError, match="name a directory that all nodes of the engine share"):
            async with following(bus, settings(1, **apart), model_dir, tmp_path) as running:
                await asyncio.wait({running}, timeout=60)
        elsewhere.rename(file)


async def test_a_port_that_a_stranger_has_is_named_before_any_rank_starts(bus, settings, ranks):
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        head = f"head:{stranger.getsockname()[1]}"
        with pytest.raises(
            EngineError, match=rf"rendezvous={head}: node 0 cannot have this port on .*in use"
        ):
            async with LeadingNode(bus, settings(0, rendezvous=head)).leading():
                pass
    assert await bus.get(node_key(head, 0), EngineNode) is None, "no other node has been told to start"
