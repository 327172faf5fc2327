"""A real SGLang server that adds the policy's adapters itself, each version as one of its own."""

from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from actors.engines.base import InterruptedGenerationError
from actors.engines.sglang.engine import SglangEngine
from actors.settings.engines import SglangEngineConfig
from tests.actors.adapters import adapter_of, served, with_adapter
from tests.actors.sglang_served import CONFIG, EACH_ON_A_CORE, FIRST, MOST_NATS, PROMPT, in_flight, started
from tests.actors.tiny import recomputed

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(420)]
ADAPTERS = [adapter_of(FIRST, seed) for seed in range(4)]
POLICIES = [with_adapter(FIRST, adapter) for adapter in ADAPTERS]


def check(generation, *versions, prompt=PROMPT):
    """All tokens are of these versions, in order, and have the log-probs of transformers under them."""
    assert [version for version, _ in groupby(generation.policy_versions.tolist())] == [*versions]
    [version] = versions
    expected = recomputed(POLICIES[version], prompt, generation)
    np.testing.assert_allclose(generation.logprobs, expected, rtol=0, atol=MOST_NATS)


async def test_each_version_is_an_adapter_of_its_own_and_requests_end_with_theirs(tmp_path):
    FIRST.config.save_pretrained(tmp_path / "model")
    config = SglangEngineConfig(**CONFIG, adapter="loaded")
    engine = SglangEngine(tmp_path / "model", config, tmp_path / "engine.log", served=served(2))
    try:
        await engine.start()
        await engine.load_weights(FIRST.state_dict() | ADAPTERS[0], 0)
        long, medium = started(engine, "long", new=3000), started(engine, "medium", new=200)
        await in_flight(engine, long, medium)
        await engine.load_weights(ADAPTERS[1], 1)
        assert not long.done()
        assert not medium.done()
        later, short = started(engine, "later", new=300), started(engine, "short", new=20)
        check(await short, 1)
        check(await medium, 0)
        checksums = await engine.checksums()
        assert not long.done()
        await engine.load_weights(ADAPTERS[2], 2)  # one more than the server may have
        partial = await long
        assert partial.finish_reason == "abort"
        assert len(partial.token_ids) > 200
        check(partial, 0)
        last = started(engine, "last", new=20)
        check(await last, 2)
        [scores] = await engine.score([PROMPT])
        with torch.inference_mode():
            logprobs = POLICIES[2](torch.tensor([PROMPT])).logits[0].log_softmax(-1)
        wanted = logprobs[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
        np.testing.assert_allclose(scores, wanted, rtol=0, atol=MOST_NATS)
        await engine.load_weights(ADAPTERS[3], 3)
        check(await later, 1)
        assert await engine.checksums() == checksums, "the frozen weights stay as they are"
        names = [name for name in await engine._client.adapters() if name.startswith("sluice-")]
        assert [name.split("-")[3] for name in names] == ["v2", "v3"]
        await engine._client.unload_adapter(names[-1], 30.0)
        with pytest.raises(InterruptedGenerationError, match=f"has lost an adapter, .*{names[-1]}"):
            await started(engine, "lost", new=20)
    finally:
        await engine.close()


@pytest.mark.nightly
async def test_both_ranks_of_a_server_add_their_part_of_an_adapter(tmp_path):
    FIRST.config.save_pretrained(tmp_path / "model")
    config = SglangEngineConfig(**CONFIG, adapter="loaded", server={"tp_size": 2}, environment=EACH_ON_A_CORE)
    engine = SglangEngine(tmp_path / "model", config, tmp_path / "engine.log", served=served(2))
    try:
        await engine.start()
        await engine.load_weights(FIRST.state_dict() | ADAPTERS[0], 0)
        earlier = started(engine, "earlier", new=200)
        await in_flight(engine, earlier)
        await engine.load_weights(ADAPTERS[1], 1)
        check(await started(engine, "later", new=20), 1)
        check(await earlier, 0)
    finally:
        await engine.close()


@pytest.mark.nightly
async def test_a_mixture_of_experts_has_adapters_in_its_attention(tmp_path):
    torch.manual_seed(0)
    sizes = FIRST.config.to_diff_dict() | {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    del sizes["model_type"]
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, moe_intermediate_size=64)).float().eval()
    model.save_pretrained(tmp_path / "model")  # under the names of files, as the learner publishes
    state = load_file(tmp_path / "model/model.safetensors")
    attention = {name: t for name, t in adapter_of(model, 0).items() if "self_attn" in name}
    only = replace(served(2), modules=("o_proj", "q_proj"))
    config = SglangEngineConfig(**CONFIG, adapter="loaded")
    engine = SglangEngine(tmp_path / "model", config, tmp_path / "engine.log", served=only)
    try:
        await engine.start()
        await engine.load_weights(state | attention, 0)
        found = await started(engine, "one", new=32)
    finally:
        await engine.close()
    expected = recomputed(with_adapter(model, attention), PROMPT, found)
    np.testing.assert_allclose(found.logprobs, expected, rtol=0, atol=MOST_NATS)
