"""`launch bench learning` on a tiny run of the real system."""

import json
from pathlib import Path

import pytest

from benchmarks.learning.outcome import Outcome
from benchmarks.whole_runs.results import Results
from tests.e2e.commands import Command

pytestmark = [pytest.mark.nats, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(600)]
STEPS = 4


def test_a_preset_whose_rollouts_fail_is_a_cell_with_a_curve_and_counts(tmp_path: Path):
    command = Command(
        tmp_path, "bench", "learning", "--json", "--directory", str(tmp_path / "found"), "--presets", "guess",
        "--failures", "0.5", "--seeds", "3", "--steps", str(STEPS), "--warmup.steps", "2",
        "--admission.groups-per-step", "4", "--admission.samples-per-prompt", "4",
    )  # fmt: skip
    try:
        assert command.wait(500.0) == 0, command.said()
    finally:
        command.kill()
    [line] = [line for line in command.said().splitlines() if line.startswith("{")]
    found = json.loads(line)
    assert (found["cells"], found["measured_now"], found["failed"]) == (1, 1, {})
    [outcome] = Results(tmp_path / "found" / "cells.jsonl", Outcome.of_json).outcomes.values()
    assert outcome.cell.name == "guess-failures500-seed3"
    assert outcome.steps == (0, STEPS)
    assert 0.2 < outcome.failed_episodes / outcome.episodes < 0.8
    assert 0 < outcome.trained_trajectories <= outcome.sampled_trajectories
    assert (tmp_path / "found" / "learning.png").exists()
