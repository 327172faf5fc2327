"""Shapes of the models that are measured with, by the names that commands take."""

from collections.abc import Mapping

from bus.codec import Json

SHAPES: Mapping[str, Mapping[str, Json]] = {
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "max_position_embeddings": 4096,
        "tie_word_embeddings": False, "dtype": "float32",
    },
    "135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 8192,
        "rope_theta": 1e5, "tie_word_embeddings": True, "dtype": "float32",
    },
    "qwen3-0.6b": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 32768,
        "rope_theta": 1e6, "tie_word_embeddings": True, "dtype": "bfloat16",
    },
    "qwen3-4b": {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 32768,
        "rope_theta": 1e6, "tie_word_embeddings": True, "dtype": "bfloat16",
    },
    "qwen3-8b": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 32768,
        "rope_theta": 1e6, "tie_word_embeddings": False, "dtype": "bfloat16",
    },
    "qwen3-32b": {
        "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 32768,
        "rope_theta": 1e6, "tie_word_embeddings": False, "dtype": "bfloat16",
    },
    "qwen3-30b-a3b": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 32768,
        "rope_theta": 1e6, "tie_word_embeddings": False, "dtype": "bfloat16", "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    },
}  # fmt: skip
"""The part of config.json that is not the same for all."""
