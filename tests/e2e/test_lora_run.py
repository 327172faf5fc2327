"""The sort preset with adapters, from the command line to a directory of peft's."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.commands import Command, assert_whole
from tests.e2e.lora_settings import SMALL

# By day test_lora_of_experts_run.py has adapters of attention, too.
pytestmark = [pytest.mark.nats, pytest.mark.nightly]


def test_the_sort_preset_trains_adapters_and_its_engine_agrees(tmp_path):
    run = Command(tmp_path, "local", *SMALL, "--directory", str(tmp_path))
    assert run.process.wait(240) == 0, run.output.read_text()[-3000:]
    directory = tmp_path / "sort"
    assert_whole(directory, 4, 4, 4)
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    losses = [each["train/loss"] for each in records if each.get("train/stage") == "warmup"]
    assert losses[-1] < losses[0] - 0.3  # nats
    mismatches = [each["policy/mismatch_nats"] for each in records if "policy/mismatch_nats" in each]
    assert mismatches
    assert max(mismatches) < 1e-4
    sent = [each for each in records if each.get("weights/wire_bytes")]
    assert sent
    assert all(each["weights/wire_bytes"] < 0.1 * each["weights/full_bytes"] for each in sent)
    base = load_file(directory / "model/model.safetensors")
    whole_weights = load_file(directory / "export/model.safetensors")
    adapter = load_file(directory / "export/adapter/adapter_model.safetensors")
    name = "model.layers.1.self_attn.k_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{letter}.weight"] for letter in "AB")
    wanted = base[f"{name}.weight"].float() + 2.0 * b @ a
    assert torch.allclose(whole_weights[f"{name}.weight"], wanted, atol=1e-6)
    assert json.loads((directory / "export/adapter/adapter_config.json").read_text())["r"] == 4
