"""A worker that is told to stop gives back groups that agent programs have not finished."""

import asyncio
import sys
from pathlib import Path

import pytest

from actors.engines.base import Sampling
from actors.environments.agent import AgentEnvironment
from actors.policy.policy import Policy
from actors.rewards.group_filters import load_filter
from actors.rollouts.worker import Worker
from actors.settings.agents import AgentConfig
from actors.weights.follow import PolicyFollower
from benchmarks.scripted_engine import ScriptedEngine
from bus.codec import encode
from bus.messages import Lease
from bus.streams.consume import Inbox, understood
from bus.streams.publish import Publisher
from tests.actors.gateway.served import TOKENIZER, script, until
from tests.factories import make_lease


@pytest.mark.nats
@pytest.mark.usefixtures("quick")
async def test_stop_of_many_agent_programs_is_quick_and_their_leases_are_others(bus, tmp_path: Path):
    pids = tmp_path / "pids"
    program = f"import os, time; open({str(pids)!r}, 'a').write('.'); time.sleep(300)"
    (tmp_path / "agent.py").write_text(program)
    command = f"{sys.executable} -S {tmp_path / 'agent.py'}"
    config = AgentConfig(command=command, programs_at_once=6, isolation={"writable": (tmp_path,)})
    environment = AgentEnvironment.from_config(config, finish_within_s=0.2)
    environment.stop_with(stop := asyncio.Event())
    engine = ScriptedEngine(script(lambda _: "fine"), policy_version=0)
    worker = Worker(
        bus, Policy(engine, TOKENIZER, Sampling(max_new_tokens=16)), environment,
        follower=PolicyFollower(bus, engine), keep=load_filter("none"), shards=2, name="tester",
    )  # fmt: skip
    for number in (0, 2, 4):
        lease = make_lease(number, samples=4)
        await Publisher(bus).publish(
            bus.subject("tasks", "rollout"), encode(lease), message_id=f"lease-{number}"
        )
    working = asyncio.create_task(worker.run(stop, groups_at_once=3))
    await until(lambda: pids.exists() and len(pids.read_text()) == 6, "as many programs as may run")
    stop.set()
    async with asyncio.timeout(60):  # the programs would take minutes
        await working
    await environment.close()
    inbox, given_back = Inbox(bus, "TASKS", "rollout"), []
    async with asyncio.timeout(30):
        while len(given_back) < 3:
            given_back += [r.message.lease_id for r in await understood(await inbox.take(3), bus, Lease)]
    assert sorted(given_back) == [0, 2, 4]
    stored = await bus.js.stream_info(bus.topology.stream("TRAJECTORIES"))
    assert stored.state.messages == 0
    assert len(pids.read_text()) == 6  # none was started after the stop
