"""Adapters in a stand-in of an SGLang server: what is loaded, what is ended, what is refused and lost."""

import asyncio
import json
import time

import pytest
import torch

from actors.engines.base import InterruptedGenerationError
from actors.engines.fleet.fleet import Fleet
from actors.engines.sglang import requests_in_progress
from actors.engines.sglang.adapters import serving, with_fused_layers
from actors.engines.sglang.client.weight_labels import weights_label
from actors.settings.engines import SglangEngineConfig
from actors.settings.fleet import FleetConfig
from bus.errors import ConfigError, EngineError, WeightsKeptError
from tests.actors.adapters import MODULES, RANK, SCALE, served
from tests.actors.engines.sglang.adapters_at_stand_in import BASE, LORA, A, B, adapter, asked, begun
from tests.actors.sglang_stand_in import TIMEOUT_S, has_failed
from tests.actors.tiny import request


def piece(server):
    """All of an answer, as the last piece of a stream has it."""
    found = server._generated(4)
    found["meta_info"]["completion_tokens"] = 4
    return found


@pytest.fixture
def server(stand_in):
    stand_in.lora.settings = dict(LORA)
    return stand_in


@pytest.fixture
def attach(attach, server):
    def attached(versions=2, **settings):
        return attach(served=served(versions), **{"adapter": "loaded", "stream_interval": 0} | settings)

    return attached


async def with_oldest_under_way(server, attach):
    """An engine, and a request that the server has under the first adapter and does not go on with."""
    engine = attach()
    await engine.start()
    await engine.load_weights(BASE | adapter(0.0), 0)
    server.running.clear()
    oldest = begun(engine, "oldest")
    await asked(server, 1)
    return engine, oldest


@pytest.mark.parametrize("update", ["disk", "tensor"])
async def test_frozen_weights_come_once_and_each_version_as_an_adapter_of_its_own(server, attach, update):
    engine = attach(update=update)
    await engine.start()
    await engine.load_weights(BASE | adapter(0.0), 7)
    await engine.load_weights({A: torch.full((RANK, 6), 5.0)}, 8)
    assert server.weights.keys() == BASE.keys()
    assert server.versions == ["7"]
    assert "pause_generation" not in server.said
    first, second = server.lora.loaded.values()
    assert first["lora_name"].split("-")[3] == "v7"
    assert first["lora_name"].split("-")[4] != second["lora_name"].split("-")[4], "the digest is another"
    assert second["config_dict"] == {
        "peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK,
        "target_modules": ["k_proj", "q_proj", "v_proj"],
    }  # fmt: skip
    assert torch.equal(second["tensors"][A], torch.full((RANK, 6), 5.0))
    assert torch.equal(second["tensors"][B], torch.zeros(8, RANK))
    found = await begun(engine, "one")
    assert found.policy_versions.tolist() == [8] * 4
    assert server.asked[-1]["lora_path"] == second["lora_name"]


async def test_requests_end_under_the_adapter_they_began_with_until_it_is_too_old(server, attach):
    engine, oldest = await with_oldest_under_way(server, attach)
    await engine.load_weights(adapter(1.0), 1)
    older = begun(engine, "older")
    await asked(server, 2)
    assert not oldest.done()
    assert len(server.lora.loaded) == 2
    await asyncio.wait_for(engine.load_weights(adapter(2.0), 2), TIMEOUT_S)
    ended = await asyncio.wait_for(oldest, TIMEOUT_S)
    assert (ended.finish_reason, ended.policy_versions.tolist()) == ("abort", [0, 0])
    assert not older.done()
    assert [name.split("-")[3] for name in server.lora.loaded] == ["v1", "v2"]
    server.running.set()
    assert (await older).policy_versions.tolist() == [1] * 4
    assert (await begun(engine, "new")).policy_versions.tolist() == [2] * 4


async def test_requests_end_that_have_a_version_outside_the_window_though_those_between_were_skipped(
    server, attach
):
    engine, oldest = await with_oldest_under_way(server, attach)
    await asyncio.wait_for(engine.load_weights(adapter(1.0), 2), TIMEOUT_S)
    assert (await asyncio.wait_for(oldest, TIMEOUT_S)).policy_versions.tolist() == [0, 0]
    assert [name.split("-")[3] for name in server.lora.loaded] == ["v2"]


async def test_requests_whose_abort_the_server_has_lost_are_ended_with_all_others(
    server, attach, monkeypatch
):
    monkeypatch.setattr(requests_in_progress, "ABORT_ALL_AFTER_S", 0.1)
    engine, oldest = await with_oldest_under_way(server, attach)
    await engine.load_weights(adapter(1.0), 1)
    older = begun(engine, "older")
    await asked(server, 2)
    server.lora.loses_aborts = True
    await asyncio.wait_for(engine.load_weights(adapter(2.0), 2), TIMEOUT_S)
    for ended, version in ((oldest, 0), (older, 1)):
        found = await asyncio.wait_for(ended, TIMEOUT_S)
        assert (found.finish_reason, found.policy_versions.tolist()) == ("abort", [version] * 2)


async def test_an_adapter_of_a_request_that_was_abandoned_and_runs_on_is_unloaded(
    server, attach, monkeypatch
):
    monkeypatch.setattr(requests_in_progress, "ABORT_ALL_AFTER_S", 0.1)
    engine = attach()
    await engine.start()
    await engine.load_weights(BASE | adapter(0.0), 0)
    server.running.clear()
    server.lora.loses_aborts = True
    abandoned = begun(engine, "abandoned")
    await asked(server, 1)
    abandoned.cancel()
    await asyncio.wait([abandoned], timeout=TIMEOUT_S)
    for version in (1, 2):
        await asyncio.wait_for(engine.load_weights({}, version), TIMEOUT_S)
    assert [name.split("-")[3] for name in server.lora.loaded] == ["v1", "v2"]


@pytest.mark.parametrize("again", [9, 8])
async def test_requests_end_that_have_a_version_which_a_resumed_learner_makes_again(server, attach, again):
    server.lora.settings |= {"max_loras_per_batch": 5, "max_loaded_loras": 5}
    engine = attach(versions=4)
    await engine.start()
    await engine.load_weights(BASE | adapter(0.0), 7)
    server.running.clear()
    before = begun(engine, "before")
    await asked(server, 1)
    await engine.load_weights(adapter(1.0), 8)
    await engine.load_weights(adapter(2.0), 9)
    dead = begun(engine, "dead")
    await asked(server, 2)
    await asyncio.wait_for(engine.load_weights(adapter(3.0), again), TIMEOUT_S)
    ended = await asyncio.wait_for(dead, TIMEOUT_S)
    assert (ended.finish_reason, ended.policy_versions.tolist()) == ("abort", [9, 9])
    assert not before.done()
    found = [name.split("-")[3] for name in server.lora.loaded]
    assert found == (["v7", "v8", "v9"] if again == 9 else ["v7", "v8"])
    assert torch.equal([*server.lora.loaded.values()][-1]["tensors"][A], adapter(3.0)[A])
    server.running.set()
    await before


async def test_a_request_whose_adapter_is_too_old_goes_on_with_the_newest_each_token_of_its_own(
    server, attach
):
    async def build():
        return attach()

    fleet = Fleet({"one": build}, FleetConfig())
    await fleet.start()
    await fleet.load_weights(BASE | adapter(0.0), 0)
    server.running.clear()
    oldest = asyncio.create_task(fleet.generate(request("oldest", [1], new=5)))
    await asked(server, 1)
    for version in (1, 2):
        await fleet.load_weights(adapter(float(version)), version)
    server.running.set()
    found = await asyncio.wait_for(oldest, TIMEOUT_S)
    assert (found.finish_reason, found.policy_versions.tolist()) == ("length", [0, 0, 2, 2, 2])
    [first, second] = server.asked[-2:]
    assert len(second["input_ids"]) == len(first["input_ids"]) + 2
    assert [one["lora_path"].split("-")[3] for one in (first, second)] == ["v0", "v2"]
    await fleet.close()


async def test_a_version_in_which_nothing_changed_has_a_name_of_its_own(server, attach):
    engine = attach()
    await engine.start()
    await engine.load_weights(BASE | adapter(0.0), 0)
    await engine.load_weights({}, 1)
    assert len(server.lora.loaded) == 2
    assert (await begun(engine, "one")).policy_versions.tolist() == [1] * 4


async def test_a_server_that_was_started_again_gets_its_frozen_weights_and_the_newest_adapter(server, attach):
    engine = attach()
    await engine.start()
    await engine.load_weights(BASE | adapter(0.0), 0)
    server.weights, server.version, server.lora.loaded = {}, "default", {}
    await engine.load_weights({A: torch.ones(RANK, 6)}, 1)
    assert server.weights.keys() == BASE.keys()
    [loaded] = server.lora.loaded.values()
    assert torch.equal(loaded["tensors"][A], torch.ones(RANK, 6))
    assert torch.equal(loaded["tensors"][B], torch.zeros(8, RANK))
    assert (await begun(engine, "one")).policy_versions.tolist() == [1] * 4


async def test_an_adapter_that_the_server_lost_fails_the_engine_and_the_next_one_loads_it(server, attach):
    async def build():
        return attach()

    fleet = Fleet({"one": build}, FleetConfig(backoff_s=0.01))
    await fleet.start()
    await fleet.load_weights(BASE | adapter(0.0), 0)
    await fleet.load_weights(adapter(3.0), 1)
    server.weights, server.version, server.lora.loaded = {}, "default", {}
    found = await asyncio.wait_for(begun(fleet, "one"), TIMEOUT_S)
    assert found.policy_versions.tolist() == [1] * 4
    assert server.weights.keys() == BASE.keys()
    [loaded] = server.lora.loaded.values()
    assert torch.equal(loaded["tensors"][A], torch.full((RANK, 6), 3.0))
    assert fleet.engines["one"]["restarts"] == 1
    await fleet.close()


async def test_an_adapter_that_is_refused_fails_the_engine(server, attach):
    engine = attach()
    await engine.start()
    await engine.load_weights(BASE | adapter(0.0), 0)
    server.lora.refuses = True
    with pytest.raises(EngineError, match=r"did not take policy version 1: .*out of memory"):
        await engine.load_weights(adapter(1.0), 1)
    assert engine.policy_version == 0
    await has_failed(engine)


@pytest.mark.parametrize("streams", [False, True])
async def test_tokens_that_other_frozen_weights_drew_are_of_no_version(server, attach, streams):
    server.streams = streams
    engine = attach(stream_interval=2)
    await engine.start()
    await engine.load_weights(BASE | adapter(0.0), 3)
    server.version = weights_label(9)
    server.pieces = [piece(server)]
    with pytest.raises(
        InterruptedGenerationError, match=r"weights of version 9, and those of .* ver"
    ) as raised:
        await begun(engine, "one")
    assert not len(raised.value.partial.token_ids)
    await has_failed(engine)


async def test_nothing_that_is_drawn_beside_tokens_of_other_frozen_weights_counts(server, attach):
    server.streams = True
    engine = attach(stream_interval=2)
    await engine.start()
    await engine.load_weights(BASE | adapter(0.0), 3)
    part = piece(server)
    part["meta_info"]["finish_reason"] = None
    server.pieces = [part]
    other = begun(engine, "other")
    await asyncio.wait_for(server.piece_sent.wait(), TIMEOUT_S)
    while not len(next(iter(engine.in_progress)).left().token_ids):  # noqa: ASYNC110 - read, not only sent
        await asyncio.sleep(0)
    server.version = "9"
    server.pieces = [piece(server)]
    for request_ in (begun(engine, "one"), other):
        with pytest.raises(InterruptedGenerationError) as raised:
            await asyncio.wait_for(request_, TIMEOUT_S)
        assert not len(raised.value.partial.token_ids)


async def test_adapters_of_an_actor_that_died_are_unloaded_and_those_of_others_stay(server, attach):
    server.lora.loaded = {"sluice-abc-0-v7-d": {}, "my-adapter": {}}
    engine = attach()
    await engine.start()
    await engine.load_weights(BASE | adapter(0.0), 0)
    theirs, ours = server.lora.loaded
    assert (theirs, ours.split("-")[3]) == ("my-adapter", "v0")


async def test_adapters_of_others_that_leave_too_little_room_are_refused(server, attach):
    server.lora.loaded = {"one": {}, "two": {}}
    wanted = "max_loaded_loras=4 and 2 adapters of others, as one: .* --max-loaded-loras 5"
    with pytest.raises(ConfigError, match=wanted):
        await attach().start()


async def test_frozen_weights_without_their_adapter_answer_no_request(server, attach, monkeypatch):
    engine, reached = attach(), asyncio.Event()
    await engine.start()
    await engine.load_weights(BASE | adapter(0.0), 0)
    server.version, server.lora.loaded = "default", {}

    async def never(body, timeout_s):
        reached.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(engine._client, "load_adapter", never)
    loading = asyncio.create_task(engine.load_weights({}, 1))
    await asyncio.wait_for(reached.wait(), TIMEOUT_S)
    with pytest.raises(EngineError, match="no adapter of the policy yet: it loads its frozen weights"):
        await engine.score([[1, 2, 3]])
    loading.cancel()
    await asyncio.wait([loading], timeout=TIMEOUT_S)
    monkeypatch.undo()
    engine._open()  # as a health check that went well does
    waiting = begun(engine, "one")
    async with asyncio.timeout(TIMEOUT_S):
        while engine.waiting == 0:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0)
    assert engine.running == 0
    await engine.load_weights({}, 1)
    assert (await waiting).policy_versions.tolist() == [1] * 4


@pytest.mark.parametrize("arrived", [True, False])
async def test_a_load_that_is_cancelled_leaves_no_adapter_behind(server, attach, arrived, monkeypatch):
    engine, reached = attach(), asyncio.Event()
    await engine.start()
    await engine.load_weights(BASE | adapter(0.0), 0)
    load = engine._client.load_adapter

    async def never(body, timeout_s):
        if arrived:
            await load(body, timeout_s)
        reached.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(engine._client, "load_adapter", never)
    for _ in range(2):
        reached.clear()
        loading = asyncio.create_task(engine.load_weights(adapter(1.0), 1))
        await asyncio.wait_for(reached.wait(), TIMEOUT_S)
        loading.cancel()
        await asyncio.wait([loading], timeout=TIMEOUT_S)
    monkeypatch.undo()
    assert (await begun(engine, "old")).policy_versions.tolist() == [0] * 4
    for version in (2, 3):
        await engine.load_weights({}, version)
    assert [name.split("-")[3] for name in server.lora.loaded] == ["v2", "v3"]
    assert all(torch.equal(one["tensors"][A], adapter(1.0)[A]) for one in server.lora.loaded.values())


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"enable_lora": None}, "was started without --enable-lora"),
        ({"max_lora_rank": 2}, "has max_lora_rank=2, and 4 are needed"),
        ({"max_loras_per_batch": 2}, "has max_loras_per_batch=2, and 3 are needed"),
        ({"max_loaded_loras": 2}, "has max_loaded_loras=2, and 3 are needed"),
        ({"lora_target_modules": ["q_proj"]}, r"has lora_target_modules=\['q_proj'\] without down_proj, o_"),
    ],
)
async def test_a_server_that_cannot_have_the_adapters_is_refused_with_the_flags(
    server, attach, setting, reason
):
    server.lora.settings |= setting
    with pytest.raises(ConfigError, match=reason) as raised:
        await attach().start()
    wanted = (
        "--enable-lora --max-lora-rank 4 --lora-target-modules down_proj o_proj q_proj up_proj "
        "--max-loras-per-batch 3 --max-loaded-loras 3"
    )
    assert wanted in str(raised.value)


async def test_replicas_and_servers_without_the_endpoint_are_refused(server, attach):
    server.replicas = 2
    with pytest.raises(ConfigError, match=r"has 2 replicas \(dp_size times pp_size\)"):
        await attach().start()
    server.replicas, server.lora.settings = 1, {}
    with pytest.raises(ConfigError, match=r"has no /load_lora_adapter_from_tensors \(SGLang 0\.5\.23\)"):
        await attach().start()


async def test_a_mixture_of_experts_with_adapters_outside_its_attention_is_refused(attach, tmp_path):
    config = {"architectures": ["Qwen3ForCausalLM"], "num_experts": 4}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="mixture of experts with adapters of down_proj, up_proj, and SGLa"):
        await attach().start()


async def test_frozen_weights_that_come_slowly_leave_the_adapter_all_of_its_time(server, attach, monkeypatch):
    engine, given = attach(update_timeout_s=5.0), []
    await engine.start()
    tensors, load_adapter = engine._loading.tensors, engine._client.load_adapter

    async def slowly(config, state, version):
        load = await tensors(config, state, version)
        now = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: now() + 4.0)  # outside the pause
        return load

    async def noted(body, timeout_s):
        given.append(timeout_s)
        await load_adapter(body, timeout_s)

    monkeypatch.setattr(engine._loading, "tensors", slowly)
    monkeypatch.setattr(engine._client, "load_adapter", noted)
    await engine.load_weights(BASE | adapter(0.0), 0)
    assert given[0] > 4.0


async def test_an_engine_with_adapters_does_not_release_its_device(attach):
    engine = attach()
    await engine.start()
    with pytest.raises(EngineError, match="the server has adapters, which it could not take back from here"):
        await engine.release()


async def test_adapters_of_another_rank_are_refused(server, attach):
    engine = attach()
    await engine.start()
    with pytest.raises(WeightsKeptError, match="is of rank 2, and the server was started for rank 4"):
        await engine.load_weights(BASE | {A: torch.ones(2, 6), B: torch.ones(8, 2)}, 0)


async def test_whole_weights_where_adapters_should_be_are_refused(server, attach):
    engine = attach()
    await engine.start()
    with pytest.raises(
        WeightsKeptError, match=r"learner publishes whole weights now \(learner\.lora\.publish\)"
    ):
        await engine.load_weights(BASE, 0)


def test_layers_that_sglang_computes_together_have_an_adapter_each():
    found = with_fused_layers(adapter(1.0), BASE)
    assert len(found) == 6
    for name in ("k_proj", "v_proj"):
        assert torch.equal(found[A.replace("q_proj", name)], torch.zeros(RANK, 6))
        assert torch.equal(found[B.replace("q_proj", name)], torch.zeros(4, RANK))


def test_a_server_of_our_own_is_started_for_the_adapters_unless_the_user_says_otherwise():
    config = SglangEngineConfig(adapter="loaded", server={"max-lora-rank": 64, "device": "cpu"})
    assert serving(config, served(6)).settings == {
        "enable_lora": True,
        "max_lora_rank": 64,
        "lora_target_modules": MODULES,
        "max_loras_per_batch": 7,
        "max_loaded_loras": 7,
        "lora_backend": "torch_native",
        "device": "cpu",
    }
    assert serving(config, None) is config
    on_gpu = SglangEngineConfig(adapter="loaded", server={"device": "cuda"})
    assert "lora_backend" not in serving(on_gpu, served(6)).settings
