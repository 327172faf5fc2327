"""`launch bench critic` with a few steps: bus, storage, actors and a learner with a critic, as processes."""

import json
from pathlib import Path

import pytest

from storage.disk import checkpoints
from storage.disk.run_directory import RunDirectory
from storage.metrics.records import read_records
from tests.e2e.commands import Command

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.nats, pytest.mark.timeout(900)]
STEPS = 3


def bench(directory: Path, *arguments: str) -> Command:
    return Command(
        directory, "bench", "critic", "--json", "--directory", "runs", "--seeds", "1",
        "--objectives", "gae_vtrace", "--turns", "2", *arguments,
    )  # fmt: skip


def ended(command: Command, status: int) -> str:
    try:
        assert command.wait(800.0) == status, command.said()
    finally:
        command.kill()
    return command.said()


def test_policy_and_critic_train_in_a_run_whose_figures_are_kept(tmp_path: Path):
    said = ended(bench(tmp_path, "--steps", str(STEPS), "--warmup-steps", "2"), 0)
    [line] = [line for line in said.splitlines() if line.startswith("{")]
    report = json.loads(line)
    assert report["complete"]
    assert report["runs"]["gae_vtrace-0"]["steps"] == STEPS
    run = RunDirectory(tmp_path / "runs", "gae_vtrace-0")
    steps = [record for record in read_records(run.metrics) if record.get("train/stage") == "rl"]
    assert len(steps) == STEPS
    for record in steps:
        assert record["critic/value_loss"] > 0
        assert record["critic/skipped_updates"] == 0
        assert record["policy/entropy_nats"] > 0
    manifest = json.loads((checkpoints.latest(run.checkpoints) / "manifest.json").read_text())
    assert manifest["training"]["critic"]["updates_done"] == 2 * STEPS  # epochs of every step
    exported = sorted(path.name for path in run.export.iterdir())
    assert "model.safetensors" in exported  # of the policy, which engines load
    began = len(list(read_records(run.metrics)))
    again = ended(bench(tmp_path, "--steps", str(STEPS), "--warmup-steps", "2"), 0)
    assert line in again.splitlines()
    assert len(list(read_records(run.metrics))) == began
    assert "is of another plan" in ended(bench(tmp_path, "--steps", "9"), 2)
