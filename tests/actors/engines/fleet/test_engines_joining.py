"""Servers that join an actor's fleet while it works, and leave it, over the bus."""

import asyncio
import json
import sys

import pytest

from actors.engines.fleet.engine_admin import EngineAdmin, attached_builds, subject_of
from actors.engines.fleet.engine_claims import EngineClaims, role_of
from actors.engines.fleet.fleet import Fleet
from actors.engines.fleet.shared_servers import SharedServers
from actors.engines.on_policy import on_policy
from actors.policy.cut_off_sampling import told_by
from actors.settings.actors import SamplingConfig
from actors.settings.engines import EmbeddedEngineConfig, SglangEngineConfig
from actors.settings.fleet import FleetConfig
from benchmarks.scripted_engine import ScriptedEngine
from bus.connection import roles
from bus.connection.roles import pids_of
from bus.errors import BusError, ConfigError, FencedError
from bus.messages import RoleHolder, Status
from bus.requests import Done, EngineChange
from launch.operations.live_run import change_engine, list_engines
from launch.settings.run_config import validate
from tests.actors.adapters import served
from tests.actors.sglang_stand_in import STATE, TOKEN, StandIn
from tests.actors.tiny import request

pytestmark = [pytest.mark.nats]
TIMEOUT_S = 60
ACTOR = "actor-host.of.dots-7"


@pytest.fixture
async def servers():
    servers = [StandIn(), StandIn()]
    for server in servers:
        await server.start()
    yield servers
    for server in servers:
        await server.close()


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    return directory


def settings(tmp_path, **more):
    return SglangEngineConfig(weights_directory=tmp_path / "weights", start_timeout_s=5.0, **more)


@pytest.fixture
async def fleet(bus, model, tmp_path):
    """An actor's fleet of one scripted engine, with its admin on the bus."""

    async def build():
        return ScriptedEngine(lambda _: [1, 2, 3, 4])

    fleet, stop = Fleet({"engine-0": build}, FleetConfig(requests_per_engine=2)), asyncio.Event()
    await fleet.start()
    await fleet.load_weights(STATE, 3)
    claims = EngineClaims(bus, ACTOR)
    admin = EngineAdmin(bus, fleet, settings(tmp_path), model, claims, actor=ACTOR, colocated=False)
    serving = asyncio.create_task(admin.run(stop))
    yield fleet
    stop.set()
    await serving
    await fleet.close()


async def asked(bus, action, engine):
    change = EngineChange(action=action, engine=engine)
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                return await bus.request(subject_of(bus, ACTOR), change, Done, timeout_s=TIMEOUT_S)
            except BusError as error:
                if "nobody serves" not in str(error):  # its admin is about to open
                    raise
                await asyncio.sleep(0.02)


async def serves(fleet, name):
    async with asyncio.timeout(TIMEOUT_S):
        while fleet.engines[name]["state"] != "serving":  # noqa: ASYNC110 - a state, not an event
            await asyncio.sleep(0.02)


async def test_a_server_that_joins_takes_the_newest_weights_and_its_share_and_leaves_again(
    bus, fleet, servers
):
    server = servers[0]
    assert isinstance(await asked(bus, "join", server.url + "/"), Done)
    await serves(fleet, server.url)
    assert server.versions == ["3"]
    answers = await asyncio.gather(*(fleet.generate(request(f"r{n}", [n], new=4)) for n in range(4)))
    tokens = [answer.token_ids.tolist() for answer in answers]
    assert tokens.count([TOKEN] * 4) == tokens.count([1, 2, 3, 4]) == 2
    assert {int(version) for answer in answers for version in answer.policy_versions} == {3}
    with pytest.raises(BusError, match="is one of this actor's engines already"):
        await asked(bus, "join", server.url)
    await asked(bus, "leave", server.url)
    assert list(fleet.engines) == ["engine-0"]
    assert (await fleet.generate(request("after", [9], new=4))).token_ids.tolist() == [1, 2, 3, 4]


async def test_a_server_that_cannot_have_the_adapters_of_the_policy_does_not_join(
    bus, servers, model, tmp_path
):
    fleet, stop = Fleet({}, FleetConfig()), asyncio.Event()
    admin = EngineAdmin(
        bus, fleet, settings(tmp_path, adapter="loaded"), model, EngineClaims(bus, ACTOR), actor=ACTOR,
        colocated=False, shared=SharedServers(served(6), {}),
    )  # fmt: skip
    serving = asyncio.create_task(admin.run(stop))
    servers[0].lora.settings = {"enable_lora": True, "max_lora_rank": 2}
    with pytest.raises(BusError, match=f"{servers[0].url} has max_lora_rank=2, and 4 are needed"):
        await asked(bus, "join", servers[0].url)
    assert not fleet.engines
    stop.set()
    await serving
    await fleet.close()


async def test_a_server_that_cannot_tell_what_it_kept_does_not_join_where_that_is_recorded(
    bus, servers, model, tmp_path
):
    fleet, stop = Fleet({}, FleetConfig()), asyncio.Event()
    recording = told_by(settings(tmp_path), SamplingConfig(top_p=0.9, keep_masks=True))
    admin = EngineAdmin(bus, fleet, recording, model, EngineClaims(bus, ACTOR), actor=ACTOR, colocated=False)
    serving = asyncio.create_task(admin.run(stop))
    servers[0].kept_sets = {}
    with pytest.raises(BusError, match="which does not tell what it kept"):
        await asked(bus, "join", servers[0].url)
    assert not fleet.engines
    stop.set()
    await serving
    await fleet.close()


@pytest.mark.parametrize(
    ("described", "version", "why"),
    [
        ({"model_type": "glm4_moe"}, "0.5.17", r"choosing experts of GLM-4\.5 .* use 0\.5\.19 or later"),
        ({"rope_scaling": {"type": "dynamic"}}, "0.5.23", "SGLang scales angles of the rope_type 'dynamic'"),
        ({"model_type": "qwen3_moe"}, "0.5.23", "routed_experts: .* start it with --enable-return-routed-ex"),
    ],
)
async def test_a_server_that_would_compute_or_record_otherwise_does_not_join_embedded_engines(
    bus, servers, model, described, version, why
):
    (model / "config.json").write_text(json.dumps({"architectures": ["Glm4MoeForCausalLM"]} | described))
    servers[0].sglang = version
    fleet, stop = Fleet({}, FleetConfig()), asyncio.Event()
    embedded, claims = EmbeddedEngineConfig(routed_experts=True), EngineClaims(bus, ACTOR)
    admin = EngineAdmin(bus, fleet, embedded, model, claims, actor=ACTOR, colocated=False)
    serving = asyncio.create_task(admin.run(stop))
    with pytest.raises(BusError, match=why):
        await asked(bus, "join", servers[0].url)
    assert not fleet.engines
    stop.set()
    await serving
    await fleet.close()


async def test_a_server_that_another_actor_uses_is_refused_by_that_actors_name(
    bus, connect, fleet, servers, tmp_path
):
    first, second = servers[0].url, servers[1].url
    both = settings(tmp_path, urls=(first, second))
    async with connect("other") as other:
        async with EngineClaims.open(other, "actor-b", settings(tmp_path, url=first + "/")):
            with pytest.raises(BusError, match=rf"{first}: actor-b uses this server"):
                await asked(bus, "join", first)
            with pytest.raises(ConfigError, match=rf"{first}: actor-b uses this server.*name another server"):
                async with EngineClaims.open(bus, "actor-c", both):
                    pytest.fail("two actors on one server")
        await asked(bus, "join", first)
        with pytest.raises(ConfigError, match=f"{first}: {ACTOR} uses this server"):
            async with EngineClaims.open(other, "actor-b", both):
                pytest.fail("two actors on one server")
        await asked(bus, "leave", first)
        async with EngineClaims.open(other, "actor-b", both):
            pass


async def test_a_claim_of_an_actor_that_was_killed_is_taken_over_at_once(bus, tmp_path):
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(600)")
    url = "http://there:1"
    dead = RoleHolder(incarnation="actor-dead", host="h", pid=child.pid, pids_of=pids_of())
    await bus.put(f"role.{role_of(url)}", dead)
    child.kill()
    await child.wait()
    async with asyncio.timeout(roles.EXPIRE_S), EngineClaims.open(bus, "a", settings(tmp_path, url=url)):
        pass


async def test_an_actor_ends_when_its_server_was_claimed_by_another(bus, tmp_path):
    url = "http://there:1"
    async with EngineClaims.open(bus, "actor-a", settings(tmp_path, url=url)) as claims:
        watching = asyncio.create_task(claims.run(asyncio.Event()))
        await bus.put(f"role.{role_of(url)}", RoleHolder(incarnation="actor-b", host="h", pid=1))
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(FencedError, match="another process took over as engine"):
                await watching


async def test_what_cannot_join_or_leave_is_refused_with_the_reason(bus, fleet, servers):
    await servers[1].close()
    with pytest.raises(BusError, match="no answer from an SGLang server at"):
        await asked(bus, "join", servers[1].url)
    with pytest.raises(BusError, match=r"no engine 'engine-9' here: there are engine-0"):
        await asked(bus, "leave", "engine-9")
    with pytest.raises(BusError, match="engine-0 is the only engine here"):
        await asked(bus, "leave", "engine-0")
    assert list(fleet.engines) == ["engine-0"]


async def test_no_server_joins_an_actor_that_shares_its_devices_with_the_learner(bus, model, tmp_path):
    fleet, stop = Fleet({}, FleetConfig()), asyncio.Event()
    claims = EngineClaims(bus, ACTOR)
    admin = EngineAdmin(bus, fleet, settings(tmp_path), model, claims, actor=ACTOR, colocated=True)
    serving = asyncio.create_task(admin.run(stop))
    with pytest.raises(BusError, match=r"http://there:1 cannot join: .*colocation\.enabled"):
        await asked(bus, "join", "http://there:1")
    assert not fleet.engines
    stop.set()
    await serving


@pytest.mark.parametrize("numerics", ["exact", "sglang"])
async def test_no_server_joins_engines_that_compute_as_the_learner_does(bus, model, tmp_path, numerics):
    fleet, stop = Fleet({}, FleetConfig()), asyncio.Event()
    config = EmbeddedEngineConfig() if numerics == "exact" else on_policy(settings(tmp_path))
    admin = EngineAdmin(
        bus, fleet, config, model, EngineClaims(bus, ACTOR), actor=ACTOR, colocated=False,
        exact=numerics == "exact",
    )  # fmt: skip
    serving = asyncio.create_task(admin.run(stop))
    with pytest.raises(BusError, match=r"http://there:1 cannot join: .*model\.numerics"):
        await asked(bus, "join", "http://there:1")
    stop.set()
    await serving


async def test_an_actor_attaches_to_every_url_that_it_is_given(servers, model, tmp_path):
    config = settings(tmp_path, urls=tuple(server.url for server in servers))
    fleet = Fleet(attached_builds(config, model), FleetConfig(requests_per_engine=1))
    await fleet.start()
    await fleet.load_weights(STATE, 0)
    await asyncio.gather(*(fleet.generate(request(f"r{n}", [n], new=4)) for n in range(2)))
    await fleet.close()
    assert [server.said.count("generate") for server in servers] == [2, 2], "one is the probe's"
    assert [server.versions for server in servers] == [["0"], ["0"]]


@pytest.mark.slow
async def test_the_command_finds_the_actor_by_what_it_says(bus, bus_server, connect, fleet, servers):
    async def says_what_it_has():
        while True:
            values = {"engines": fleet.engines} if started.is_set() else {}
            status = Status(source=ACTOR, role="actor", doing="", pid=1, peak_rss_bytes=1, values=values)
            await bus.notify(bus.subject("status", "actor"), status)
            await asyncio.sleep(0.1)

    where = validate({"run": "test", "bus": {"url": bus_server.url}})
    started, stop, url = asyncio.Event(), asyncio.Event(), servers[0].url
    with pytest.raises(ConfigError, match="no actor of run 'test' was heard within 2 s: if none"):
        await list_engines(where, stop)
    saying = asyncio.create_task(says_what_it_has())
    try:
        async with asyncio.timeout(60):
            with pytest.raises(ConfigError, match=r"'test' has an engine yet: actor-host\.of\.dots-7: "):
                await list_engines(where, stop)
            started.set()
            assert await change_engine(where, EngineChange(action="join", engine=url), None, stop) == ACTOR
            await serves(fleet, url)
            found = await list_engines(where, stop)
            assert found[ACTOR].keys() == {"engine-0", url}
            with pytest.raises(ConfigError, match=r"is an engine of actor-host\.of\.dots-7 already"):
                await change_engine(where, EngineChange(action="join", engine=url), None, stop)
            with pytest.raises(ConfigError, match=r"no actor 'other': there are actor-host"):
                await change_engine(where, EngineChange(action="leave", engine=url), "other", stop)
            with pytest.raises(ConfigError, match=r"which actor is to let nobody go\? none has it"):
                await change_engine(where, EngineChange(action="leave", engine="nobody"), None, stop)
            assert await change_engine(where, EngineChange(action="leave", engine=url), None, stop) == ACTOR
    finally:
        saying.cancel()
    assert list(fleet.engines) == ["engine-0"]
