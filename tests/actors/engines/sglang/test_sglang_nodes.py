"""A SGLang server with a rank in each of two nodes, on this machine's CPU (`make test-sglang`)."""

import asyncio
import os
import signal

import numpy as np
import psutil
import pytest
import torch

from actors.engines.fleet.engine_nodes import FollowingNode, LeadingNode
from actors.engines.sglang.engine import SglangEngine
from actors.settings.engines import SglangEngineConfig
from bus.errors import EngineError, EngineNodeLostError, leaves
from bus.server.nats_server import free_port
from tests.actors.sglang_served import CONFIG, FIRST, PROMPT, SECOND
from tests.actors.tiny import recomputed, request

pytestmark = [pytest.mark.sglang, pytest.mark.nats, pytest.mark.nightly, pytest.mark.timeout(1500)]


async def assert_serves(engine, policy, version):
    """Its log-probs are those of these weights, of which each node has a half."""
    await engine.load_weights(policy.state_dict(), version)
    generation = await engine.generate(request(f"v{version}", PROMPT, new=16))
    assert set(generation.policy_versions.tolist()) == {version}
    np.testing.assert_allclose(generation.logprobs, recomputed(policy, PROMPT, generation), atol=1e-5)


def ranks_of_node_1():
    [launcher] = [one for one in psutil.Process().children() if '"node_rank": 1' in " ".join(one.cmdline())]
    return launcher.pid


def moved(policy):
    """Change a few elements, so that only these are written into the server."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(torch.where(torch.rand(parameter.shape) < 0.05, parameter * 2, parameter))
    return policy


async def until_lost(leader, engine, third):
    """Serve three versions, then lose the second node."""
    lost = asyncio.Queue()
    async with leader.leading(), leader.watched(lost.put_nowait):
        try:
            await leader.start()
            await engine.start()
            for version, policy in enumerate((FIRST, SECOND, third)):
                await assert_serves(engine, policy, version)
            os.killpg(ranks_of_node_1(), signal.SIGKILL)
            raise EngineError(await asyncio.wait_for(lost.get(), 120))
        finally:
            await engine.close()


async def test_both_nodes_take_each_version_and_begin_anew_when_one_is_lost(bus, model_dir, tmp_path):
    rendezvous = f"127.0.0.1:{free_port('127.0.0.1')}"

    def of_node(rank):
        return SglangEngineConfig(
            **CONFIG | {"start_timeout_s": 600.0}, nodes=2, node_rank=rank, rendezvous=rendezvous,
            server={"tp_size": 2}, weights_directory=tmp_path / "shared",
            environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
        )  # fmt: skip

    def engine():
        return SglangEngine(model_dir, of_node(0), tmp_path / "node-0.log")

    stop, third = asyncio.Event(), moved(type(SECOND)(SECOND.config).eval())
    node = FollowingNode(bus, of_node(1), model_dir, tmp_path / "node-1.log", first_gpu=0)
    following = asyncio.create_task(node.run(stop))
    try:
        with pytest.raises(ExceptionGroup) as raised:
            await until_lost(LeadingNode(bus, of_node(0)), engine(), third)
        [error] = leaves(raised.value)
        assert isinstance(error, EngineNodeLostError), error
        assert "node 1 (" in str(error)
        leader, second = LeadingNode(bus, of_node(0)), engine()
        async with leader.leading():
            await leader.start()
            await second.start()
            await assert_serves(second, third, 7)
            await second.close()
    finally:
        stop.set()
        await following
