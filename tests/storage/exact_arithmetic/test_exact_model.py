"""Which models compute in exact arithmetic, and how others are refused."""

import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from bus.errors import ConfigError
from storage.exact_arithmetic import functions
from storage.exact_arithmetic.exact_model import make_exact
from tests.learner.tiny import tiny_config
from tests.storage.exact_arithmetic.threads import two_threads

pytestmark = pytest.mark.slow

KIND = "tests_exact"


def attend(module, query, key, value, attention_mask, *, scaling, **_):
    return functions.causal_attention(query, key, value, scale=scaling).transpose(1, 2), None


AttentionInterface.register(KIND, attend)
TEXT = {
    "vocab_size": 58, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip
TOKENS = torch.randint(0, 58, (3, 40), generator=torch.Generator().manual_seed(0))


def exact_model(family: str, **changes: object):
    torch.manual_seed(0)
    config = tiny_config(family, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=KIND).eval()
    make_exact(model, lambda: model(input_ids=TOKENS[:1, :2], use_cache=False))
    return model


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@torch.no_grad()
def test_logits_of_a_token_do_not_depend_on_the_batch_and_are_near_the_models_own(family):
    model = exact_model(family)
    together = model(input_ids=TOKENS, use_cache=False).logits
    with two_threads():
        part = model(input_ids=TOKENS[1:, :17], use_cache=False).logits
    assert torch.equal(part, together[1:, :17])
    plain = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager").eval()
    plain.load_state_dict(model.state_dict())
    assert (plain.double()(input_ids=TOKENS).logits - together).abs().max() < 1e-5


def test_a_mixture_and_another_activation_are_refused_by_their_operations():
    with pytest.raises(ConfigError, match=r"does not know .*aten\._grouped_mm.*Qwen3MoeForCausalLM"):
        exact_model("qwen3_moe")
    with pytest.raises(ConfigError, match=r"does not know torch\.ops\.aten\.gelu,"):
        exact_model("llama", hidden_act="gelu")


def test_a_longer_context_than_sums_take_is_no_matter_as_long_as_sequences_are_short():
    assert exact_model("llama", max_position_embeddings=131072).config.max_position_embeddings == 131072


def test_a_longer_sequence_or_vocabulary_than_sums_take_is_refused():
    long = torch.zeros(1, 1, 65537, 1)
    with pytest.raises(ConfigError, match=r"a sequence has 65537 tokens, .* at most 65536"):
        functions.causal_attention(long[:, :, :1], long, long, scale=1.0)
    with pytest.raises(ConfigError, match=r"at most 262144 probabilities.*has 262145 tokens"):
        exact_model("llama", vocab_size=262145, hidden_size=8, num_attention_heads=2)


def test_a_model_of_images_is_refused():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "depth": 1, "out_hidden_size": 32}
    config = Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
        vision_config=sizes,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    with pytest.raises(ConfigError, match=r"for text alone, and a qwen2_5_vl has other parts"):
        make_exact(model, lambda: None)
