"""The SGLang engine over a stand-in of its server: failures and what is sent, without SGLang."""

import asyncio
import json
import time
from math import inf

import pytest
import torch

from actors.engines.base import InterruptedGenerationError
from actors.engines.sglang.client import cache_loads
from actors.engines.sglang.client.client import SglangClient
from actors.engines.sglang.client.weight_labels import OtherWeightsError, weights_label
from actors.engines.sglang.in_server.sluice_changes import APPLY
from actors.engines.sglang.requests_in_progress import RequestsInProgress
from actors.engines.sglang.served_policy import ServedPolicy
from bus.errors import ConfigError, EngineError
from tests.actors.sglang_stand_in import STATE, TIMEOUT_S, TOKEN, has_failed
from tests.actors.tiny import request


@pytest.fixture
def server(stand_in):
    return stand_in


async def test_a_server_that_hangs_fails_what_is_in_flight_and_the_engine_for_good(server, attach):
    engine = attach(health_every_s=0.05, health_timeout_s=0.5)
    await engine.start()
    await engine.load_weights(STATE, 0)
    server.running.clear()
    with pytest.raises(EngineError, match=r"did not generate within 0\.5 s, 2 times"):
        await asyncio.wait_for(engine.generate(request("hangs", [1])), TIMEOUT_S)
    await has_failed(engine)
    server.running.set()
    await engine.close()


@pytest.mark.parametrize("label", ["0.another", "default"])
async def test_an_engine_ends_whose_server_has_weights_that_it_did_not_give_it(server, attach, label):
    engine = attach()
    await engine.start()
    await engine.load_weights(STATE, 0)
    assert await engine.score([[TOKEN]]) == [[]]
    server.version = label
    with pytest.raises(OtherWeightsError, match="one actor of one run"):
        await engine.score([[TOKEN]])
    with pytest.raises(InterruptedGenerationError, match="one actor of one run") as raised:
        await engine.generate(request("r", [1]))
    assert not len(raised.value.partial.token_ids)
    await has_failed(engine)


async def test_a_server_that_does_not_take_weights_fails_the_engine(server, attach):
    engine = attach()
    await engine.start()
    await engine.load_weights(STATE, 0)
    server.refuses_weights = True
    with pytest.raises(EngineError, match=r"did not take policy version 1: .*out of memory"):
        await engine.load_weights(STATE, 1)
    await has_failed(engine)
    assert engine.policy_version == 0
    await engine.close()


@pytest.mark.parametrize("trouble", ["none", "started again", "loaded by another", "cancelled", "released"])
async def test_a_server_has_what_it_is_to_have_whatever_became_of_it(server, attach, trouble, monkeypatch):
    server.custom_weight_loader = [APPLY]
    engine = attach()
    await engine.start()
    states = [STATE]
    for n in (2, 3, 5):
        states.append({name: tensor.clone() for name, tensor in states[-1].items()})
        states[-1]["large"][n, n] = n
    await engine.load_weights(states[0], 0)
    await engine.load_weights(states[1], 1)
    assert server.said.count("update_weights_from_tensor") == 1
    if trouble == "started again":
        server.weights, server.version = {name: t * 0 - 1 for name, t in STATE.items()}, "default"
    elif trouble == "loaded by another":
        server.weights, server.version = {name: t * 0 - 1 for name, t in STATE.items()}, "7"
    if trouble == "cancelled":
        asked = asyncio.Event()

        async def never(*args, **kwargs):
            asked.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(engine._client, "load_changes", never)
        loading = asyncio.create_task(engine.load_weights({"large": states[2]["large"]}, 2))
        await asyncio.wait_for(asked.wait(), TIMEOUT_S)
        loading.cancel()
        await asyncio.wait([loading], timeout=TIMEOUT_S)
        assert loading.cancelled()
        monkeypatch.undo()
    elif trouble == "released":
        await engine.release()
        await engine.load_weights({"large": states[2]["large"]}, 2)
        server.weights = {name: t * 0 - 1 for name, t in STATE.items()}
        await engine.resume()
    else:
        await engine.load_weights({"large": states[2]["large"]}, 2)
    await engine.load_weights({"large": states[3]["large"]}, 3)
    assert all(torch.equal(server.weights[name], states[3][name]) for name in STATE)
    changes = {"none": 3, "cancelled": 1}.get(trouble, 2)
    assert server.said.count("update_weights_from_tensor") == changes
    await engine.close()


@pytest.mark.parametrize("update", ["disk", "tensor"])
@pytest.mark.parametrize(
    ("sessions", "says"), [(True, {"selector": "target"}), (False, {"disable_draft_model": True})]
)
async def test_a_draft_model_of_its_own_gets_no_weights_of_the_policy(server, attach, update, sessions, says):
    server.update_sessions, server.custom_weight_loader = sessions, [APPLY]
    server.speculation, server.draft = "STANDALONE", "/draft"
    engine = attach(update=update)
    await engine.start()
    changed = STATE["large"].clone()
    changed[2, 3] = 7.0
    await engine.load_weights(STATE, 0)
    await engine.load_weights({"large": changed}, 1)
    await engine.close()
    assert torch.equal(server.weights["large"], changed)
    begun = ["begin_weight_update"] if sessions else []
    assert [body["path"] for body in server.updates] == [*begun, "update_weights_from_tensor"] * 2
    assert all(body.items() >= says.items() for body in server.updates)
    loaders = [body.get("load_format") for body in server.updates if body["path"] not in begun]
    assert loaders == [None, APPLY if update == "disk" else None]


@pytest.mark.parametrize("update", ["disk", "tensor"])
@pytest.mark.parametrize("draft", [None, "stand-in"])
async def test_a_draft_model_of_the_policys_own_checkpoint_gets_its_weights(server, attach, update, draft):
    server.speculation, server.draft, server.custom_weight_loader = "EAGLE", draft, [APPLY]
    engine = attach(update=update)
    await engine.start()
    await engine.load_weights(STATE, 0)
    await engine.load_weights({}, 1)
    await engine.close()
    begun = ["begin_weight_update"] if update == "tensor" else []
    assert [body["path"] for body in server.updates] == [*begun, f"update_weights_from_{update}"] * 2
    assert not any({"selector", "disable_draft_model"} & body.keys() for body in server.updates)


@pytest.mark.parametrize(
    ("family", "version", "fits"),
    [
        ("glm4_moe", "0.5.17", False), ("glm4_moe", "0.5.18", False), ("glm4_moe", "0.5.19", True),
        ("glm4_moe", "0.5.9", True), ("qwen3", "0.5.17", True),
    ],
)  # fmt: skip
async def test_a_server_that_would_keep_routers_of_older_weights_is_refused(
    server, attach, tmp_path, family, version, fits
):
    server.sglang = version
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": family}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    engine = attach()
    try:
        if fits:
            await engine.start()
        else:
            with pytest.raises(ConfigError, match=rf"{version}, .* experts of GLM-4\.5 .* use 0\.5\.19"):
                await engine.start()
    finally:
        await engine.close()


async def test_replicas_with_a_draft_model_of_their_own_are_refused(server, attach):
    server.speculation, server.draft, server.replicas = "EAGLE", "/draft", 2
    engine = attach()
    with pytest.raises(ConfigError, match=r"set actors\.fleet\.engines instead of dp_size"):
        await engine.start()
    await engine.close()


async def test_an_update_that_fails_is_ended_at_the_server(server, attach):
    engine = attach(update="tensor")
    await engine.start()
    server.refuses_weights = True
    with pytest.raises(EngineError, match="out of memory"):
        await engine.load_weights(STATE, 0)
    assert not server.updating, "nobody else could begin one"
    await engine.close()


async def test_a_server_that_is_away_is_waited_for_and_then_named(server, attach):
    engine = attach(health_timeout_s=1.0)
    await server.close()
    engine._server._config = engine._config.model_copy(update={"start_timeout_s": 0.3})
    with pytest.raises(EngineError, match="no answer from an SGLang server at"):
        await asyncio.wait_for(engine.start(), TIMEOUT_S)
    await engine.close()


@pytest.mark.parametrize("update", ["disk", "tensor"])
async def test_a_version_without_a_changed_tensor_reaches_the_server(server, attach, update, tmp_path):
    engine, in_files = attach(update=update), []
    await engine.start()
    resume = engine._client.resume

    async def resumed():
        in_files.append(bool(list(tmp_path.rglob("*.safetensors"))))
        await resume()

    engine._client.resume = resumed
    with pytest.raises(EngineError, match="the first weights of an engine must be all of them"):
        await engine.load_weights({}, 0)
    await engine.load_weights(STATE, 0)
    await engine.load_weights({}, 1)
    generation = await engine.generate(request("after", [1], new=4))
    assert not list(tmp_path.rglob("*.safetensors")), "the host holds the weights once, and not in files"
    assert in_files == [update == "disk"] * 2, "files are removed when the server goes on"
    await engine.close()
    assert generation.policy_versions.tolist() == [1] * 4
    assert server.versions == ["0", "1"]


async def test_a_server_that_was_left_in_an_update_goes_on_when_an_engine_attaches(server, attach):
    server.running.clear()
    server.updating = True
    engine = attach(update="tensor")
    await asyncio.wait_for(engine.start(), TIMEOUT_S)
    await engine.load_weights(STATE, 0)
    assert not server.updating
    assert len((await engine.generate(request("after", [1], new=4))).token_ids) == 4
    await engine.close()


@pytest.mark.parametrize("update", ["disk", "tensor"])
async def test_draining_and_loading_share_one_limit(server, attach, update, monkeypatch):
    """Each of both would be in time alone, and both together are more than the fleet waits."""
    engine, limits_s = attach(update=update, pause="drain", update_timeout_s=60.0), []
    await engine.start()
    await engine.load_weights(STATE, 0)
    name = {"disk": "load_files", "tensor": "load_tensors"}[update]
    load = getattr(engine._client, name)

    async def limited(*args, timeout_s, **settings):
        limits_s.append(timeout_s)
        await load(*args, timeout_s=timeout_s, **settings)

    monkeypatch.setattr(engine._client, name, limited)
    server.running.clear()
    flight = asyncio.create_task(engine.generate(request("long", [1], new=4)))
    async with asyncio.timeout(TIMEOUT_S):
        while engine.running == 0:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0)
        updating = asyncio.create_task(engine.load_weights(STATE, 1))
        while engine._own.serving.is_set():  # noqa: ASYNC110 - until it drains
            await asyncio.sleep(0)
        draining = time.monotonic()
        await asyncio.sleep(0.2)
        drained_s = time.monotonic() - draining
        server.running.set()
        await updating
    assert 0 < limits_s[0] <= 60.0 - drained_s
    await flight
    await engine.close()


async def test_a_limit_that_draining_used_up_ends_the_update(server, attach):
    engine = attach(pause="drain", update_timeout_s=0.1)
    await engine.start()
    engine._own.taken(0)
    engine._own.open()
    server.running.clear()
    flight = asyncio.create_task(engine.generate(request("long", [1], new=4)))
    async with asyncio.timeout(TIMEOUT_S):
        while engine.running == 0:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0)
        with pytest.raises(EngineError, match="1 requests did not end within"):
            await engine.load_weights(STATE, 1)
        with pytest.raises(EngineError, match="did not take policy version 1"):
            await flight
    server.running.set()
    await engine.close()


async def test_requests_that_are_to_begin_again_before_the_abort_is_answered_are_waited_for_no_more():
    class Server:
        async def abort_all(self):
            ended.set()
            await flight.sent
            flights.renew(flight)

    ended, flights = asyncio.Event(), RequestsInProgress(Server)
    with flights.new(request("first", [1]), ServedPolicy()) as flight:
        flight.sent = asyncio.create_task(ended.wait())
        await asyncio.wait_for(flights.interrupt(TIMEOUT_S), TIMEOUT_S)
        assert flight.sent is None


async def test_how_full_the_cache_is_comes_from_the_server_over_all_replicas(server, attach, monkeypatch):
    monkeypatch.setattr(cache_loads, "PERIOD_S", 0.01)
    used = {"num_used_tokens": 300, "num_waiting_uncached_tokens": 50, "max_total_num_tokens": 1000}
    server.loads = [used, {"num_used_tokens": 100, "max_total_num_tokens": 1000}]
    engine = attach()
    await engine.start()
    async with asyncio.timeout(TIMEOUT_S):
        while engine.kv_tokens is None:  # noqa: ASYNC110 - the fleet asks it, too
            await asyncio.sleep(0.01)
        assert engine.kv_tokens[:3] == (450, 2000, True)
        server.loads = [{"num_used_tokens": 7, "max_total_num_tokens": 10}]
        while engine.kv_tokens.used != 7:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await engine.close()


async def test_server_that_does_not_tell_how_full_it_is_leaves_it_open(server, attach):
    engine = attach()
    await engine.start()
    assert engine.kv_tokens is None
    assert "v1/loads" not in server.said
    await engine.close()


@pytest.mark.parametrize(
    "said",
    [
        {}, {"loads": None}, {"loads": [{}]}, {"loads": [7]}, {"loads": []},
        *({"loads": [{"num_used_tokens": used, "max_total_num_tokens": 9}]} for used in (-5, inf)),
    ],
)  # fmt: skip
def test_loads_that_say_nothing_of_use_are_none(said):
    assert cache_loads.read_loads(said, 1) is None


@pytest.mark.filterwarnings("error::ResourceWarning")
async def test_a_body_larger_than_a_mebibyte_is_sent_in_pieces(server):
    client, server.version = SglangClient.connect(server.url), weights_label(0)
    try:
        await client.generate(request("r", [123_456] * 200_000), rid="r", salt="", timeout_s=TIMEOUT_S)
    finally:
        await client.close()


async def test_a_later_engine_shares_nothing_of_a_version_with_the_one_that_the_server_had_before(
    server, attach
):
    for _ in range(2):
        engine = attach()
        await engine.start()
        await engine.load_weights(STATE, 0)
        for name in ("first", "sibling"):
            await engine.generate(request(name, [1]))
        await engine.close()
    salts = [body["extra_key"] for body in server.asked if not body["rid"].startswith("probe")]
    assert salts[0] == salts[1] != salts[2] == salts[3]
