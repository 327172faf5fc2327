"""A model with sliding windows, from the embedded engine to the learner."""

from pathlib import Path

import pytest
from transformers import Gemma3TextConfig

from tests.e2e.commands import records_of_run
from tests.e2e.test_router_replay_run import written

pytestmark = [pytest.mark.nats, pytest.mark.slow, pytest.mark.nightly]
SMALL = (
    "--preset", "sort", "--warmup.steps", "40", "--warmup.batch-size", "16", "--learner.steps", "4",
    "--admission.groups-per-step", "4", "--admission.samples-per-prompt", "4",
    "--evaluation.every-versions", "0", "--learner.target-accuracy", "none",
)  # fmt: skip
GEMMA = Gemma3TextConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, query_pre_attn_scalar=16, sliding_window=5, sliding_window_pattern=3,
    max_position_embeddings=64, bos_token_id=None, eos_token_id=1, pad_token_id=0,
)  # fmt: skip


def test_engine_and_learner_agree_on_a_model_with_windows(tmp_path: Path):
    records = records_of_run(tmp_path, *SMALL, "--model.path", str(written(GEMMA, tmp_path / "model")))
    assert sum(each.get("train/stage") == "rl" for each in records) == 4
    found = [each["policy/mismatch_nats"] for each in records if "policy/mismatch_nats" in each]
    assert found
    assert max(found) < 1e-4
