"""What SGLang servers have on GPUs only: `pytest -m "gpu or multi_gpu" tests/actors`."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

from actors.engines.sglang.engine import SglangEngine
from actors.settings.engines import SglangEngineConfig
from bus.errors import ConfigError
from tests.actors.adapters import adapter_of, served, with_adapter
from tests.actors.cuda import NEAR, PROMPT, SERVER, policy
from tests.actors.rounded_cache import rounded_cache
from tests.actors.sglang_served import noted
from tests.actors.tiny import recomputed, request

pytestmark = pytest.mark.timeout(900)
CACHES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@asynccontextmanager
async def serving(tmp_path, model, **settings):
    model.config.save_pretrained(tmp_path / "model")
    config = SglangEngineConfig(server=SERVER | settings)
    engine = SglangEngine(tmp_path / "model", config, tmp_path / "engine.log")
    try:
        await engine.start()
        await engine.load_weights(model.state_dict(), 0)
        yield engine
    finally:
        await engine.close()


def check(model, generation, prompt, *, version):
    assert set(generation.policy_versions.tolist()) == {version}
    expected = recomputed(model.float(), prompt, generation)
    model.bfloat16()
    np.testing.assert_allclose(generation.logprobs, expected, atol=NEAR)


@pytest.mark.gpu
async def test_drafts_of_ngrams_change_no_log_prob(tmp_path):
    first, second = policy(0), policy(1)
    try:
        async with serving(tmp_path, first, speculative_algorithm="NGRAM") as engine:
            for version, model in enumerate((first, second)):
                if version:
                    await engine.load_weights(model.state_dict(), version)
                prompt = 8 * PROMPT  # n-grams that come again
                generation = await engine.generate(request(f"v{version}", prompt, new=96))
                assert len(generation.token_ids) == 96
                check(model, generation, prompt, version=version)
            await takes_changes(engine)
    except ConfigError as refused:
        pytest.skip(str(refused))


@pytest.mark.gpu
async def test_a_draft_model_of_its_own_stays_as_it_is_while_the_policy_moves(tmp_path):
    first, second = policy(0), policy(1)
    policy(2, layers=2, intermediate=512).save_pretrained(tmp_path / "draft")
    drafts = {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": str(tmp_path / "draft"),
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    }
    async with serving(tmp_path, first, **drafts) as engine:
        before = of_draft(await engine.checksums())
        for version, model in enumerate((first, second)):
            if version:
                await engine.load_weights(model.state_dict(), version)
            generation = await engine.generate(request(f"v{version}", PROMPT, new=96))
            assert len(generation.token_ids) == 96
            check(model, generation, PROMPT, version=version)
        await takes_changes(engine)
        assert of_draft(await engine.checksums()) == before != {}


def of_draft(checksums):
    return {name: checksum for name, checksum in checksums.items() if name.startswith("draft.")}


@pytest.mark.gpu
async def test_a_deterministic_server_answers_alike_alone_and_in_company(tmp_path):
    model = policy(0)
    async with serving(tmp_path, model, enable_deterministic_inference=True) as engine:
        alone = await engine.generate(request("alone", PROMPT, new=64, seed=7))
        others = [engine.generate(request(f"other-{n}", [n, *PROMPT], new=64)) for n in range(1, 32)]
        again, *_ = await asyncio.gather(engine.generate(request("again", PROMPT, new=64, seed=7)), *others)
        assert np.array_equal(alone.token_ids, again.token_ids)
        assert np.array_equal(alone.logprobs, again.logprobs)
        check(model, again, PROMPT, version=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
async def test_a_cache_in_fp8_costs_the_log_probs_what_its_rounding_does(tmp_path, name):
    model = policy(0)
    async with serving(tmp_path, model, kv_cache_dtype=name) as engine:
        [settings] = (await engine._client.facts()).settings
        assert settings["kv_cache_dtype"] == name
        generation = await engine.generate(request("one", PROMPT, new=96))
        await takes_changes(engine)
    with rounded_cache(model.float(), CACHES[name]):
        rounded = recomputed(model, PROMPT, generation)
    plain = recomputed(model, PROMPT, generation)
    np.testing.assert_allclose(generation.logprobs, rounded, atol=NEAR)
    errors = [float(np.abs(generation.logprobs - each).mean()) for each in (rounded, plain)]
    print(f"{name}: mean difference {errors[1]:.4f} nats, {errors[0]:.4f} with a rounded cache")  # noqa: T201
    assert errors[1] < NEAR  # a good part of it is that of bfloat16


@pytest.mark.gpu
async def test_elements_that_changed_are_written_where_a_gpu_has_them(tmp_path):
    async with serving(tmp_path, policy(0)) as engine:
        await takes_changes(engine)


@pytest.mark.gpu
async def test_a_server_adds_the_adapter_of_each_version_itself(tmp_path):
    model = policy(0)
    adapters = [small(adapter_of(model, seed)) for seed in range(2)]
    model.config.save_pretrained(tmp_path / "model")
    config = SglangEngineConfig(server=SERVER, adapter="loaded")
    engine = SglangEngine(tmp_path / "model", config, tmp_path / "engine.log", served=served(2))
    try:
        await engine.start()
        await engine.load_weights(model.state_dict() | adapters[0], 0)
        earlier = asyncio.create_task(engine.generate(request("earlier", PROMPT, new=2000)))
        first = await engine.generate(request("first", PROMPT, new=64))
        await engine.load_weights(adapters[1], 1)
        assert not earlier.done()
        later = await engine.generate(request("later", PROMPT, new=64))
        for version, generation in ((0, first), (1, later), (0, await earlier)):
            check(
                with_adapter(model.float(), {n: t.float() for n, t in adapters[version].items()}),
                generation,
                PROMPT,
                version=version,
            )
            model.bfloat16()
    finally:
        await engine.close()


def small(adapter):
    """It changes no layer by more than the size of its weights, so that bfloat16 is near float32."""
    return {name: (0.3 * tensor).bfloat16() for name, tensor in adapter.items()}


async def takes_changes(engine):
    """It is at any version, and takes three more."""
    state, changes = policy(1).state_dict(), []
    await engine.load_weights(state, 7)
    engine._client.load_changes = noted(engine._client.load_changes, changes, "changes")
    moved = {name: torch.where(torch.rand(t.shape) < 0.05, t * 4, t) for name, t in state.items()}
    await engine.load_weights(moved, 8)
    assert changes == ["changes"]
    changed = await engine.checksums()
    await engine.load_weights(policy(0).state_dict(), 9)
    await engine.load_weights(moved, 10)
    assert changes == ["changes"]
    assert await engine.checksums() == changed


@pytest.mark.multi_gpu
@TWO_GPUS
@pytest.mark.parametrize("settings", [{}, {"dp_size": 2, "enable_dp_attention": True}])
async def test_ranks_of_a_server_all_take_a_new_version(tmp_path, settings):
    first, second = policy(0), policy(1)
    async with serving(tmp_path, first, tp_size=2, **settings) as engine:
        for version, model in enumerate((first, second)):
            if version:
                await engine.load_weights(model.state_dict(), version)
            prompts = [[n, *PROMPT] for n in range(4)]
            found = [engine.generate(request(f"v{version}-{n}", prompts[n], new=32)) for n in range(4)]
            for prompt, generation in zip(prompts, await asyncio.gather(*found), strict=True):
                check(model, generation, prompt, version=version)
        await takes_changes(engine)
