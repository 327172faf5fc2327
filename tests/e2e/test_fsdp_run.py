"""The sort preset with FSDP, from the command line to its checkpoint."""

import json

import pytest

from tests.e2e.commands import Command, assert_whole

pytestmark = [pytest.mark.nats, pytest.mark.slow]


SMALL = (
    "--preset", "sort", "--learner.backend", "fsdp", "--warmup.steps", "40", "--warmup.batch-size", "16",
    "--learner.steps", "4", "--admission.groups-per-step", "4", "--admission.samples-per-prompt", "4",
    "--evaluation.every-versions", "0", "--learner.target-accuracy", "none",
)  # fmt: skip


def test_the_sort_preset_learns_with_fsdp_and_its_engine_agrees(tmp_path):
    run = Command(tmp_path, "local", *SMALL, "--directory", str(tmp_path))
    assert run.process.wait(240) == 0, run.output.read_text()[-3000:]
    directory = tmp_path / "sort"
    assert_whole(directory, 4, 4, 4)
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    losses = [each["train/loss"] for each in records if each.get("train/stage") == "warmup"]
    assert losses[-1] < losses[0] - 1.0  # nats
    mismatches = [each["policy/mismatch_nats"] for each in records if "policy/mismatch_nats" in each]
    assert mismatches
    assert max(mismatches) < 1e-4
    [latest, *_] = sorted((directory / "checkpoints").glob("*/manifest.json"), reverse=True)
    assert json.loads(latest.read_text())["training"]["backend"] == "fsdp"
