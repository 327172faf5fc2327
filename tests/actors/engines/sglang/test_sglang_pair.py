"""A pair of SGLang servers as one engine: configuration, and failures over stand-ins for two servers."""

import asyncio
import json

import pytest
import torch

from actors.engines.sglang.engine import SglangEngine
from actors.engines.sglang.pair import Pair, halves, server_of
from actors.engines.sglang.server.server import OwnServer
from actors.engines.sglang.server.settings import server_settings
from actors.settings.engines import SglangEngineConfig
from bus.errors import ConfigError, EngineError
from tests.actors.sglang_stand_in import TOKEN, StandIn
from tests.actors.tiny import request

STATE = {"large": torch.ones(64, 8), "small": torch.ones(3)}
LIMIT_S = 60.0


@pytest.fixture
def model_dir(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(
        json.dumps({"architectures": ["Qwen3ForCausalLM"], "dtype": "float32"})
    )
    return model


@pytest.fixture
async def servers():
    found = StandIn(), StandIn()
    for server, role in zip(found, ("prefill", "decode"), strict=True):
        server.role = role
        await server.start()
    yield found
    for server in found:
        await server.close()


@pytest.fixture
def attach(servers, model_dir, tmp_path):
    def attached(**settings):
        prefill, decode = servers
        pair = {"enabled": True, "prefill_url": prefill.url}
        given = {"url": decode.url, "disaggregation": pair, "start_timeout_s": 5.0, **settings}
        config = SglangEngineConfig(weights_directory=tmp_path / "weights", **given)
        return SglangEngine(model_dir, config, tmp_path / "unused.log")

    return attached


async def held_at(server, engine, name):
    """A request that the prefill server has answered and `server`, the decode server, has not."""
    server.running.clear()
    flight = asyncio.create_task(engine.generate(request(name, [1, 2], new=4)))
    async with asyncio.timeout(LIMIT_S):
        while not engine._client._asked:  # noqa: ASYNC110 - nothing tells that it was sent
            await asyncio.sleep(0)
        [asked] = engine._client._asked.values()
        await asyncio.wait({asked.first})
    assert not flight.done()
    return flight


async def test_a_request_goes_to_both_servers_with_one_room(servers, attach):
    prefill, decode = servers
    engine = attach()
    await engine.start()
    await engine.load_weights(STATE, 3)
    generation = await engine.generate(request("one", [1, 2], new=4))
    await engine.generate(request("two", [1, 2], new=4))
    await engine.close()
    assert generation.token_ids.tolist() == [TOKEN] * 4
    assert generation.policy_versions.tolist() == [3] * 4
    assert prefill.versions == decode.versions == ["3"]
    [one, two], asked = prefill.asked[-2:], decode.asked[-2:]
    assert [one, two] == asked
    assert (one["bootstrap_host"], one["bootstrap_port"]) == ("127.0.0.1", 8998)
    assert one["bootstrap_room"] != two["bootstrap_room"]


async def test_the_first_token_is_of_the_weights_that_the_prefill_server_had(servers, attach):
    """The decode server takes it for its own when weights change before it has looked at it."""
    _, decode = servers
    engine = attach()
    await engine.start()
    await engine.load_weights(STATE, 0)
    flight = await held_at(decode, engine, "crossed")
    await asyncio.wait_for(engine.load_weights(STATE, 1), LIMIT_S)
    generation = await asyncio.wait_for(flight, LIMIT_S)
    assert generation.policy_versions.tolist() == [0, 1, 1, 1]
    await engine.close()


async def test_tokens_of_uncertain_versions_are_not_handed_out(servers, attach):
    _, decode = servers
    engine = attach()
    await engine.start()
    await engine.load_weights(STATE, 0)
    decode.retractions = 1
    assert len((await engine.generate(request("of one version", [1], new=4))).token_ids) == 4
    flight = await held_at(decode, engine, "put aside")
    await asyncio.wait_for(engine.load_weights(STATE, 1), LIMIT_S)
    generation = await asyncio.wait_for(flight, LIMIT_S)
    assert generation.policy_versions.tolist() == [1] * 4, "it began again"
    assert not engine.failure
    await engine.close()


@pytest.mark.parametrize("ill", ["prefill", "decode"])
async def test_either_server_that_hangs_fails_the_pair(servers, attach, ill):
    engine = attach(health_every_s=0.05, health_timeout_s=0.2)
    await engine.start()
    await engine.load_weights(STATE, 0)
    [server] = [server for server in servers if server.role == ill]
    server.running.clear()
    with pytest.raises(EngineError, match=r"did not generate within 0\.2 s, 2 times"):
        await asyncio.wait_for(engine.generate(request("hangs", [1])), LIMIT_S)
    server.running.set()
    await engine.close()


@pytest.mark.parametrize("ill", ["prefill", "decode"])
async def test_either_server_that_does_not_take_weights_fails_the_pair(servers, attach, ill):
    engine = attach(update="tensor")
    await engine.start()
    await engine.load_weights(STATE, 0)
    [server] = [server for server in servers if server.role == ill]
    server.refuses_weights = True
    with pytest.raises(EngineError, match=r"did not take policy version 1: .*out of memory"):
        await engine.load_weights(STATE, 1)
    assert engine.failure
    assert not any(server.updating for server in servers), "nobody else could begin an update"
    await engine.close()


async def test_draft_models_of_their_own_get_no_weights_of_the_policy(servers, attach):
    for server in servers:
        server.speculation, server.draft = "EAGLE", "/draft"
    engine = attach()
    await engine.start()
    await engine.load_weights(STATE, 0)
    await engine.close()
    for server in servers:
        assert [(body["path"], body["selector"]) for body in server.updates] == [
            ("begin_weight_update", "target"),
            ("update_weights_from_tensor", "target"),
        ]


async def test_a_pair_of_which_one_only_has_a_draft_model_of_its_own_is_refused(servers, attach):
    prefill, decode = servers
    prefill.speculation, prefill.draft = "EAGLE", "/draft"
    decode.speculation = "EAGLE"
    engine = attach()
    with pytest.raises(ConfigError, match="the same speculative_draft_model_path"):
        await engine.start()
    await engine.close()


async def test_servers_that_are_no_pair_are_refused(servers, attach):
    prefill, decode = servers
    for role, says in (("null", "is no prefill server of a pair"), ("decode", "is no prefill server")):
        prefill.role = role
        engine = attach()
        with pytest.raises(EngineError, match=f"{prefill.url} {says}"):
            await engine.start()
        await engine.close()
    engine = attach(disaggregation={})
    with pytest.raises(EngineError, match=f"{decode.url} is the decode server of a pair: name both"):
        await engine.start()
    await engine.close()


def paired(**settings):
    return SglangEngineConfig(**{"disaggregation": {"enabled": True, **settings.pop("pair", {})}, **settings})


def test_each_server_of_a_pair_has_its_settings_and_gpus(model_dir, tmp_path):
    config = paired(
        server={"device": "cuda", "tp-size": 2, "mem_fraction_static": 0.8},
        pair={"transfer": "nixl", "prefill": {"tp_size": 1}, "decode": {"mem-fraction-static": 0.9}},
        environment={"UCX_TLS": "all"},
        request_timeout_s=1000.0,
    )
    prefill, decode = (
        server_settings(half, model_dir, host="h", port=1, first_gpu=0) for half in halves(config, 6)
    )
    assert (prefill["disaggregation_mode"], decode["disaggregation_mode"]) == ("prefill", "decode")
    for name, value in {"disaggregation_transfer_backend": "nixl", "dtype": "float32"}.items():
        assert prefill[name] == decode[name] == value
    assert prefill["disaggregation_bootstrap_port"] == decode["disaggregation_bootstrap_port"]
    assert (prefill["tp_size"], prefill["base_gpu_id"], prefill["mem_fraction_static"]) == (1, 6, 0.8)
    assert (decode["tp_size"], decode["base_gpu_id"], decode["mem_fraction_static"]) == (2, 7, 0.9)
    environment = halves(config, 6)[0].environment
    assert environment["UCX_TLS"] == "all"
    assert environment["SGLANG_DISAGGREGATION_WAITING_TIMEOUT"] == "1000"
    chosen = paired(server={"device": "cuda", "base_gpu_id": 4}, pair={"decode": {"base_gpu_id": 1}})
    assert [half.server["base_gpu_id"] for half in halves(chosen, 6)] == [4, 1]
    assert ["base_gpu_id" in half.server for half in halves(paired(server={"device": "cpu"}), 1)] == [
        False
    ] * 2
    server = server_of(config, model_dir, tmp_path / "engine-0-a.log", 0)
    assert isinstance(server, Pair)
    assert isinstance(server.prefill, OwnServer)
    assert server.prefill._log_file.name == "engine-0-a-prefill.log"


@pytest.mark.parametrize("where", ["server", "prefill", "decode"])
def test_what_makes_two_servers_a_pair_is_not_the_users_to_set(where):
    given = {"disaggregation-bootstrap-port": 7}
    config = paired(**({"server": given} if where == "server" else {"pair": {where: given}}))
    with pytest.raises(ConfigError, match="disaggregation_bootstrap_port=7: the engine sets this itself"):
        halves(config, 0)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"update": "group"}, "set update=disk or update=tensor"),
        ({"pause": "retract"}, "set pause=in_place or pause=drain"),
        ({"routed_experts": True}, "leave one of them out"),
        ({"urls": ("http://a:1", "http://b:1")}, "one pair is named by url"),
        ({"url": "http://a:1"}, "a pair that runs already has both"),
        ({"pair": {"prefill_url": "http://a:1"}}, "a pair that runs already has both"),
        ({"url": "http://a:1", "pair": {"prefill_url": "b:1"}}, "write it as http://host:port"),
        (
            {"url": "http://a:1", "pair": {"prefill_url": "http://b:1", "decode": {"tp_size": 2}}},
            "leave out disaggregation.prefill and disaggregation.decode",
        ),
        ({"pair": {"enabled": False, "transfer": "nixl"}}, "set disaggregation.enabled=true"),
    ],
)
def test_what_does_not_go_with_a_pair_is_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        paired(**settings)


def test_a_server_that_joins_beside_a_pair_is_no_part_of_it():
    config = paired(url="http://a:1", pair={"prefill_url": "http://b:1"})
    assert config.attached_to("http://a:1").disaggregation == config.disaggregation
    assert not config.attached_to("http://c:1").disaggregation.enabled
