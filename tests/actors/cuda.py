"""A model for SGLang servers on a GPU, and what runs there without kernels that must be fetched."""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

PROMPT = [3, 4, 5, 6, 7]
SERVER = {
    "mem_fraction_static": 0.5,
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
}
NEAR = 0.1
"""Log-probs in bfloat16 are so near to those in float32, in nats."""


def policy(seed: int, *, layers: int = 4, intermediate: int = 1024) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=512, hidden_size=512, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64, max_position_embeddings=4096,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        architectures=["Qwen3ForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    return Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
