"""A worker whose rollouts clients lead takes leases when clients want tasks, and no others."""

import asyncio
from pathlib import Path

import aiohttp
import pytest

from actors.engines.base import KvTokens, Sampling
from actors.environments.clients import ClientsEnvironment
from actors.environments.single_turn import SingleTurn
from actors.gateway.task_offers import Taker
from actors.policy.context_tokens import ContextTokens
from actors.policy.policy import Policy
from actors.rewards.group_filters import load_filter
from actors.rollouts.lease_admission import LeaseAdmission, LeaseRoom
from actors.rollouts.worker import Worker, WorkerParts
from actors.settings.actors import ActorsConfig
from actors.settings.clients import ClientsConfig
from actors.weights.follow import PolicyFollower
from benchmarks.scripted_engine import ScriptedEngine
from bus.codec import encode
from bus.errors import ConfigError
from bus.security.credentials import Credentials
from bus.streams.consume import Inbox
from bus.streams.publish import Publisher
from bus.streams.received import understood
from bus.trajectory import TrajectoryBatch
from bus.waiting import cancelled
from launch.services.gateway_access import gateway_token, refuse_open_gateway
from launch.settings.run_config import RunConfig, validate
from tests.actors.gateway.served import TOKENIZER, script
from tests.factories import make_lease

TIMEOUT_S = 60


def worker_of(bus, engine, environment, kv_tokens=lambda: None) -> Worker:
    policy = Policy(engine, TOKENIZER, Sampling(max_new_tokens=16))
    parts = WorkerParts(admission=LeaseAdmission(policy.contexts, kv_tokens, soft_share=0.8))
    return Worker(
        bus, policy, environment, parts,
        follower=PolicyFollower(bus, engine), keep=load_filter("none"), shards=2, name="tester",
    )  # fmt: skip


async def give(bus, *leases):
    for lease in leases:
        subject = bus.subject("tasks", "rollout")
        await Publisher(bus).publish(subject, encode(lease), message_id=f"lease-{lease.lease_id}")


async def untaken(bus) -> int:
    info = await bus.js.consumer_info(bus.topology.stream("TASKS"), "rollout")
    return info.num_pending


@pytest.mark.nats
@pytest.mark.usefixtures("quick")
async def test_lease_is_taken_when_a_client_asks_and_its_group_is_stored_when_clients_are_done(bus):
    engine = ScriptedEngine(script(lambda _: "fine"), policy_version=0)
    environment = ClientsEnvironment.from_config(ClientsConfig(reward="posted"))
    worker, stop = worker_of(bus, engine, environment), asyncio.Event()
    await give(bus, *(make_lease(n, samples=2) for n in (0, 2, 4)))
    working = asyncio.create_task(worker.run(stop, groups_at_once=4))
    inbox, batches = Inbox(bus, "TRAJECTORIES", "shard-0"), []
    async with asyncio.timeout(TIMEOUT_S), aiohttp.ClientSession() as http:
        while not environment.url:  # noqa: ASYNC110 - it has no event for it
            await asyncio.sleep(0.01)

        async def lead() -> None:
            async with http.post(f"{environment.url}/tasks", json={"wait_s": 10}) as answer:
                taken = await answer.json()
            body = {"messages": [{"role": "user", "content": taken["prompt"]}]}
            await (await http.post(f"{taken['openai_base_url']}/chat/completions", json=body)).read()
            await (await http.post(taken["reward_url"], json=1.0)).read()

        assert await untaken(bus) == 3
        await asyncio.gather(lead(), lead())
        while not batches:
            batches += [r.message for r in await understood(await inbox.take(1), bus, TrajectoryBatch)]
        assert await untaken(bus) == 2  # nobody wants them
        stop.set()
        await working
    await environment.close()
    [batch] = batches
    assert [(t.rollout, t.reward, t.end) for t in batch.trajectories] == [
        (0, 1.0, "completed"),
        (1, 1.0, "completed"),
    ]


@pytest.mark.nats
@pytest.mark.usefixtures("quick")
async def test_leases_wait_on_the_bus_while_the_engines_caches_are_full(bus):
    engine = ScriptedEngine(script(lambda _: "fine"), policy_version=0)
    told = [KvTokens(850, 1000, shares_prefixes=False)]
    worker = worker_of(bus, engine, SingleTurn.from_config(ActorsConfig().environment), lambda: told[0])
    contexts = worker._policy.contexts
    contexts.begin(999, ["another"])  # so that the engine is not idle
    contexts.note("another", "solver", 10, 5)
    await give(bus, *(make_lease(n, samples=1) for n in (0, 2)))
    stop = asyncio.Event()
    working = asyncio.create_task(worker.run(stop, groups_at_once=4))
    async with asyncio.timeout(TIMEOUT_S):
        assert await worker.room.within(4) == 0
        assert await untaken(bus) == 2
        told[0] = KvTokens(0, 1000, shares_prefixes=False)
        contexts.ended("another")
        while worker.counts["groups"] < 2:  # noqa: ASYNC110 - it has no event for it
            await asyncio.sleep(0.01)
        stop.set()
        await working


async def test_room_that_says_nothing_lets_others_run():
    """Somebody waits, and the lease for it was taken: nobody may ask again at once."""
    environment = ClientsEnvironment.from_config(ClientsConfig(reward="posted"))
    waiting = asyncio.create_task(environment._offers.claim(None, Taker(), 5.0))
    room = LeaseRoom(environment, ContextTokens())
    room.not_begun.add(0)
    asked = asyncio.create_task(room.within(4))
    await asyncio.sleep(0)
    assert not asked.done()
    assert await asked == 0
    await cancelled(waiting)


def config_of(tmp_path: Path, *, creds: bool = False, **gateway: object) -> RunConfig:
    environment = {"type": "clients", "reward": "posted", "gateway": gateway}
    bus = {"creds": tmp_path / "actor.creds"} if creds else {}
    return validate({"actors": {"environment": environment}, "bus": bus})


def test_gateway_beyond_loopback_wants_credentials_and_tls(tmp_path: Path):
    tls = {"certificate": tmp_path / "c.pem", "certificate_key": tmp_path / "k.pem"}
    refuse_open_gateway(config_of(tmp_path))
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0 would let everybody"):
        refuse_open_gateway(config_of(tmp_path, host="0.0.0.0", **tls))
    with pytest.raises(ConfigError, match="without TLS"):
        refuse_open_gateway(config_of(tmp_path, creds=True, host="0.0.0.0"))
    refuse_open_gateway(config_of(tmp_path, creds=True, host="0.0.0.0", **tls))
    allowed = config_of(tmp_path, host="0.0.0.0")
    refuse_open_gateway(
        allowed.model_copy(update={"allow": allowed.allow.model_copy(update={"insecure": True})})
    )
    with pytest.raises(ConfigError, match="give both"):
        config_of(tmp_path, certificate=tmp_path / "c.pem")


def test_token_is_the_same_for_all_who_have_the_credentials_and_says_nothing_of_them(tmp_path: Path):
    rest = {"url": "u", "authority": "a", "run_key": "", "role_keys": "", "stream_secret": ""}
    one = Credentials(run="r", role="actor", seed="SU" + "A" * 56, **rest)
    other = Credentials(run="r", role="actor", seed="SU" + "B" * 56, **rest)
    assert one.token("gateway") == one.token("gateway") != other.token("gateway")
    assert one.token("gateway") != one.token("else")
    assert one.seed not in one.token("gateway")
    assert gateway_token(config_of(tmp_path)) is None
