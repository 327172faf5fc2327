"""A mixture of experts, from the engine that records its routing to the learner that replays it."""

from pathlib import Path

import pytest

from tests.e2e.commands import records_of_run
from tests.e2e.small_mixtures import MODELS, SMALL, written

pytestmark = [pytest.mark.nats, pytest.mark.nightly]
RUNS = (
    ("deepseek", "megatron"), ("qwen3_next", "megatron"), ("glm", "megatron"), ("gpt-oss", "megatron"),
    ("qwen2_moe", "megatron"), ("qwen3_moe", "megatron"), ("mixtral", "megatron"),
    ("qwen3_5_moe", "megatron"), ("qwen3_next", "fsdp"),
)  # fmt: skip


@pytest.mark.parametrize(("model", "backend"), RUNS)
def test_a_run_replays_the_routing_of_its_engines(tmp_path: Path, model: str, backend: str):
    path = written(MODELS[model], tmp_path / "model")
    records = records_of_run(tmp_path, *SMALL, "--model.path", str(path), "--learner.backend", backend)
    steps = [each for each in records if each.get("train/stage") == "rl"]
    assert [0 <= each["policy/router_changed_fraction"] < 0.5 for each in steps] == [True] * 4
    found = [each["policy/mismatch_nats"] for each in records if "policy/mismatch_nats" in each]
    assert found, "some tokens were drawn by the weights they were trained at"
    assert max(found) < 1e-4
