"""A directory of a model without weights."""

import json
from pathlib import Path

from transformers import Qwen3Config, Qwen3ForCausalLM, set_seed

from tests.published_chats import CHATS, tokenizer_of_chat

QWEN = tokenizer_of_chat(CHATS["Qwen3"])


def directory(path: Path, *, context: int = 256) -> Path:
    """Write a model that has learned nothing, and prompts for it."""
    set_seed(3)
    path.mkdir(exist_ok=True)
    QWEN.save_pretrained(path)
    config = Qwen3Config(
        vocab_size=len(QWEN), hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=context, eos_token_id=None,
        bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(path)
    rows = [{"prompt": f"{n}+1=", "label": str(n + 1)} for n in range(5)]
    (path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
