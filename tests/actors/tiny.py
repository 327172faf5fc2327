"""Models small enough for a test, and what they should answer, computed without a cache."""

from functools import lru_cache

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from actors.engines.base import Generation, GenerationRequest, Sampling

VOCAB = 40
CONTEXT = 256
KINDS = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


def tiny_model(kind: str, *, seed: int, attention: str = "sdpa", dtype: str = "float32") -> PreTrainedModel:
    config, model_class = KINDS[kind]
    sizes = config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=kind != "llama",
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    return model_class._from_config(sizes, attn_implementation=attention, dtype=getattr(torch, dtype)).eval()


@lru_cache
def other_model() -> PreTrainedModel:
    return tiny_model("qwen3", seed=1)


def request(name: str, prompt, new: int = 12, **sampling) -> GenerationRequest:
    return GenerationRequest(name, prompt, Sampling(max_new_tokens=new, **sampling))


@torch.inference_mode()
def recomputed(
    model: PreTrainedModel, prompt, generation: Generation, temperature: float = 1.0
) -> np.ndarray:
    """Log-probs of the sampled tokens from one forward over the whole sequence."""
    sequence = torch.tensor([[*prompt, *generation.token_ids.tolist()]])
    logprobs = torch.log_softmax(model(input_ids=sequence, use_cache=False).logits[0] / temperature, -1)
    tokens = torch.from_numpy(generation.token_ids).long()
    return logprobs[len(prompt) - 1 : -1].gather(1, tokens[:, None])[:, 0].numpy()
