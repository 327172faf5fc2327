"""The sort preset with adapters of attention and routed experts, whose routing is replayed, to the export.

Learner and engines take turns on the device, too."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.colocated_runs import COLOCATED, assert_took_turns
from tests.e2e.commands import records_of_run
from tests.e2e.lora_settings import SMALL
from tests.e2e.small_mixtures import MODELS, REPLAY, written

pytestmark = [pytest.mark.nats, pytest.mark.slow]


@pytest.mark.nightly
def test_the_sort_preset_trains_adapters_with_the_experts_of_its_engine_and_both_agree(tmp_path):
    path = written(MODELS["glm"], tmp_path / "model")
    records = records_of_run(
        tmp_path, *SMALL, *REPLAY, "--model.path", str(path), "--learner.lora.experts",
        *COLOCATED, within_s=300,
    )  # fmt: skip
    directory = tmp_path / "runs/sort"
    losses = [each["train/loss"] for each in records if each.get("train/stage") == "warmup"]
    assert losses[-1] < losses[0] - 0.2  # nats
    steps = [each for each in records if each.get("train/stage") == "rl"]
    assert [0 <= each["policy/router_changed_fraction"] < 0.5 for each in steps] == [True] * 4
    mismatches = [each["policy/mismatch_nats"] for each in records if "policy/mismatch_nats" in each]
    assert mismatches
    assert max(mismatches) < 1e-4
    sent = [each for each in records if each.get("weights/wire_bytes")]
    assert sent
    assert all(each["weights/wire_bytes"] < 0.25 * each["weights/full_bytes"] for each in sent)
    base, merged = load_file(path / "model.safetensors"), load_file(directory / "export/model.safetensors")
    adapter = load_file(directory / "export/adapter/adapter_model.safetensors")
    for name in ("model.layers.1.mlp.experts.3.down_proj", "model.layers.0.self_attn.k_proj"):
        a, b = (adapter[f"base_model.model.{name}.lora_{letter}.weight"] for letter in "AB")
        assert b.any()
        assert torch.allclose(merged[f"{name}.weight"], base[f"{name}.weight"] + 2.0 * b @ a, atol=1e-6)
    assert json.loads((directory / "export/adapter/adapter_config.json").read_text())["r"] == 4
    assert_took_turns(directory, steps=4)
