"""What exact arithmetic costs, on models and workloads so small that it only shows that it is measured."""

import pytest
import torch
from transformers import Qwen3Config

from benchmarks import exact
from benchmarks.embedded_engine import Workload as Prompts
from benchmarks.learner_workloads import Workload as Batches

TINY = Qwen3Config(
    vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=64, tie_word_embeddings=False,
    bos_token_id=None, eos_token_id=None, pad_token_id=0, dtype="float32",
)  # fmt: skip


@pytest.mark.nightly
@pytest.mark.slow
def test_both_kinds_are_measured_on_both_sides(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exact, "small", lambda: Batches(TINY, torch.float32, 16, 32, 2, rounds=1))
    for name in ("chat_workload", "demo_workload"):
        monkeypatch.setattr(exact, name, lambda: Prompts(TINY, [[3, 4, 5]] * 4, 5))
    found = exact.bench_exact(rounds=2)
    sides = ("megatron_step", "megatron_scoring", "fsdp_step", "fsdp_scoring", "engine_chat", "engine_demo")
    assert set(found) == {
        f"{side}_{figure}"
        for side in sides
        for figure in ("exact_over_fast", "fast_tokens_per_s", "exact_tokens_per_s")
    }
    assert min(found.values()) > 0
