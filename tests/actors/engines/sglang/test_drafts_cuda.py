"""Drafts by the policy's own head (`pytest -m gpu tests/actors/engines/sglang/test_drafts_cuda.py`)."""

import pytest
import torch

from actors.engines.sglang.engine import SglangEngine
from actors.settings.engines import SglangEngineConfig
from bus.errors import ConfigError
from tests.actors.cuda import NEAR, PROMPT, SERVER
from tests.actors.tiny import recomputed, request
from tests.learner.tiny import hf_state, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
SIZES = {
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024, "n_routed_experts": 8,
    "moe_intermediate_size": 256, "max_position_embeddings": 4096, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
OF_FAMILY = {
    "deepseek_v3": {
        "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 128, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        # SGLang reads these, and transformers does not.
        "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    },
    "glm4_moe": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64},
}  # fmt: skip
CLASSES = {"deepseek_v3": "DeepseekV3ForCausalLM", "glm4_moe": "Glm4MoeForCausalLM"}
NORMS = ("enorm", "hnorm", "shared_head.norm")
DRAFTS = {
    "dtype": "bfloat16",
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 1,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 2,
}


@pytest.mark.parametrize("family", OF_FAMILY)
async def test_a_server_that_drafts_by_the_policys_head_gets_it_with_each_version(tmp_path, family):
    models = [tiny_model(family, seed=n, num_mtp_layers=1, **SIZES, **OF_FAMILY[family]) for n in range(2)]
    models[0].config.architectures = [CLASSES[family]]
    models[0].config.save_pretrained(tmp_path / "model")
    server = SglangEngineConfig(server=SERVER | DRAFTS)
    engine = SglangEngine(tmp_path / "model", server, tmp_path / "engine.log")
    drafts = []
    try:
        await start_or_skip(engine)
        for version, model in enumerate(models):
            state = hf_state(model) | head_of(family, version)
            await engine.load_weights({n: tensor.bfloat16() for n, tensor in state.items()}, version)
            generation = await engine.generate(request(f"v{version}", PROMPT, new=96))
            assert set(generation.policy_versions.tolist()) == {version}
            found, other = (recomputed(each, PROMPT, generation) for each in (model, models[1 - version]))
            assert abs(generation.logprobs - found).mean() < NEAR < abs(generation.logprobs - other).mean()
            sums = await engine.checksums()
            drafts.append({name: each for name, each in sums.items() if name.startswith("draft.")})
    finally:
        await engine.close()
    assert drafts[0].keys() == drafts[1].keys() != set()
    kept = {name for name, checksum in drafts[0].items() if checksum == drafts[1][name]}
    assert not kept


async def start_or_skip(engine):
    try:
        await engine.start()
    except ConfigError as refused:
        if "glm4_moe" not in str(refused):  # which some versions cannot update
            raise
        pytest.skip(str(refused))


def head_of(family, seed):
    """Weights of a head, whose layer is the last of a model with one layer more."""
    donor = hf_state(tiny_model(family, seed=10 + seed, num_hidden_layers=3, **SIZES, **OF_FAMILY[family]))
    layer, width = "model.layers.2.", SIZES["hidden_size"]
    own = {f"{layer}{name}.weight": torch.rand(width) + 0.5 for name in NORMS}
    own[f"{layer}eh_proj.weight"] = 0.05 * torch.randn(width, 2 * width)
    return {name: tensor for name, tensor in donor.items() if name.startswith(layer)} | own
