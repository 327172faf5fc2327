"""The sort preset with FSDP and an engine that has weights in codes, from the command to a checkpoint."""

import json
from pathlib import Path

import pytest

from tests.e2e.commands import records_of_run

pytestmark = [pytest.mark.nats, pytest.mark.slow]


SMALL = (
    "--preset", "sort", "--learner.backend", "fsdp", "--warmup.steps", "16", "--warmup.batch-size", "16",
    "--learner.steps", "4", "--admission.groups-per-step", "4", "--admission.samples-per-prompt", "4",
    "--evaluation.every-versions", "0", "--learner.target-accuracy", "none",
    "--learner.publication.quantisation", "int4", "--learner.quantisation-aware",
    "--learner.entropy-coef", "0.1",  # so that every step moves the weights, whatever the rewards are
)  # fmt: skip
NEAR = 1e-5
"""Log-probs of two kernels in float32 are so near, in nats."""


@pytest.mark.nightly
def test_the_sort_preset_learns_with_fsdp_and_has_the_policy_of_its_quantised_engine(tmp_path: Path):
    records = records_of_run(tmp_path, *SMALL)
    directory = tmp_path / "runs/sort"
    losses = [each["train/loss"] for each in records if each.get("train/stage") == "warmup"]
    assert losses[-1] < losses[0] - 0.3  # nats
    mismatches = [each["policy/mismatch_nats"] for each in records if "policy/mismatch_nats" in each]
    counted = [json.loads(line) for line in (directory / "counters.jsonl").read_text().splitlines()]
    probed = [each["engine/probe_nats"] for each in counted if "engine/probe_nats" in each]
    assert mismatches
    assert probed
    assert max(*mismatches, *probed) < NEAR
    assert max(each.get("weights/full_bytes", 0) for each in records) < 900_000  # 1.2 MB in float32
    [latest, *_] = sorted((directory / "checkpoints").glob("*/manifest.json"), reverse=True)
    assert json.loads(latest.read_text())["training"]["backend"] == "fsdp"
