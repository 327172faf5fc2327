"""Writes GGUF files."""

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from transformers import LlamaConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode

Q8 = gguf.GGMLQuantizationType.Q8_0
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"
CONFIG = LlamaConfig(
    vocab_size=259, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True,
)  # fmt: skip


NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip


def name_in_file(name: str) -> str:
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name.replace("model.layers", "blk")


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Order the rows of queries and keys as llama.cpp does: the two halves of a head's rotation alternate."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def write(
    path: Path, state: dict[str, torch.Tensor], *, architecture: str = "llama", template: str = TEMPLATE
) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(32)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(259)
    writer.add_rope_dimension_count(16)
    writer.add_tokenizer_model("gpt2")
    letters = list(bytes_to_unicode().values())
    writer.add_token_list([*letters, "<|im_start|>", "<|im_end|>", "ab"])
    writer.add_token_types(
        [gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL]
    )
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    if template:
        writer.add_chat_template(template)
    for name, tensor in state.items():
        array = tensor.numpy()
        if array.ndim == 1:
            writer.add_tensor(name_in_file(name), array)
            continue
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        writer.add_tensor(
            name_in_file(name), quantize(interleaved(array, heads) if heads else array, Q8), raw_dtype=Q8
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
