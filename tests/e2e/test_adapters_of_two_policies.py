"""Runs of two trained policies with adapters of their own on the same frozen weights."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.commands import Command

pytestmark = [pytest.mark.nats, pytest.mark.nightly, pytest.mark.timeout(900)]
SMALL = (
    "--preset", "duel", "--warmup.steps", "60", "--warmup.batch-size", "16",
    "--evaluation.every-versions", "0", "--learner.target-accuracy", "none", "--learner.steps", "4",
    "--admission.groups-per-step", "2", "--admission.samples-per-prompt", "8",
    "--learner.lora.rank", "4", "--learner.optimizer.lr", "1e-3", "--warmup.optimizer.lr", "1e-2",
)  # fmt: skip
RIVAL = """
[policies.rival.warmup]
steps = 45

[policies.rival.learner.lora]
rank = 2
alpha = 3
targets = ["q_proj", "up_proj"]
"""


def run_of_two(tmp_path: Path, *flags: str) -> tuple[Path, Path]:
    """Return the directories of both runs, after each learner has trained what its engines drew."""
    (tmp_path / "rival.toml").write_text(RIVAL)
    launcher = Command(tmp_path, "local", *SMALL, "--config", "rival.toml", *flags)
    try:
        assert launcher.wait(800) == 0, launcher.said()
    finally:
        launcher.kill()
    runs = tmp_path / "runs/duel", tmp_path / "runs/duel__rival"
    assert json.loads((runs[0] / "summary.json").read_text())["accounted"]
    for run in runs:
        rows = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
        mismatches = [row["policy/mismatch_nats"] for row in rows if "policy/mismatch_nats" in row]
        assert mismatches, "some tokens were drawn by the weights they were trained at"
        assert max(mismatches) < 1e-5
    return runs


def assert_adapters_on_the_same_weights(own: Path, rival: Path) -> None:
    bases = [load_file(run / "model/model.safetensors") for run in (own, rival)]
    assert all(weight.equal(bases[1][name]) for name, weight in bases[0].items())
    found = [load_file(run / "export/adapter/adapter_model.safetensors") for run in (own, rival)]
    assert [{min(tensor.shape) for tensor in each.values()} for each in found] == [{4}, {2}]
    assert {name.split(".")[-3] for name in found[1]} == {"q_proj", "up_proj"}
    for run, tensors in zip((own, rival), found, strict=True):
        assert any(tensor.any() for name, tensor in tensors.items() if "lora_B" in name), run.name


def test_engines_of_two_policies_merge_their_own_adapters(tmp_path: Path):
    assert_adapters_on_the_same_weights(*run_of_two(tmp_path))


@pytest.mark.sglang
def test_one_server_adds_the_adapters_of_two_policies(tmp_path: Path):
    own, rival = run_of_two(
        tmp_path, "--actors.engine.type", "sglang", "--actors.engine.adapter", "loaded",
        "--actors.engine.server.max-running-requests", "32",
    )  # fmt: skip
    assert_adapters_on_the_same_weights(own, rival)
    [log] = [*(own / "logs").glob("*engine-*.log"), *(rival / "logs").glob("*engine-*.log")]
    assert log.read_text().count("POST /load_lora_adapter_from_tensors") >= 2 * 4
    for run in (own, rival):
        counters = map(json.loads, (run / "counters.jsonl").read_text().splitlines())
        probed = [row["engine/probe_nats"] for row in counters if "engine/probe_nats" in row]
        assert not probed or max(probed) < 1e-4
