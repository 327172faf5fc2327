"""`launch bench length` on a tiny run of the real system."""

import json
from pathlib import Path

import pytest

from benchmarks.length.outcome import Outcome
from benchmarks.whole_runs.results import Results
from tests.e2e.commands import Command

pytestmark = [pytest.mark.nats, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(600)]
STEPS, LAG = 4, 2


def test_a_cell_that_leaves_out_what_is_cut_off_has_curves_of_length(tmp_path: Path):
    command = Command(
        tmp_path, "bench", "length", "--json", "--directory", str(tmp_path / "found"), "--methods",
        "ppo_clip", "--lags", str(LAG), "--cut-off", "left_out", "--seeds", "3", "--steps", str(STEPS),
        "--warmup.steps", "2", "--admission.groups-per-step", "4", "--admission.samples-per-prompt", "4",
    )  # fmt: skip
    try:
        assert command.wait(500.0) == 0, command.said()
    finally:
        command.kill()
    [line] = [line for line in command.said().splitlines() if line.startswith("{")]
    found = json.loads(line)
    assert (found["cells"], found["measured_now"], found["failed"]) == (1, 1, {})
    [outcome] = Results(tmp_path / "found" / "cells.jsonl", Outcome.of_json).outcomes.values()
    assert outcome.cell.name == "ppo_clip-lag2-left-out-seed3"
    assert outcome.staleness == (0.0, 1.0, 2.0, 2.0)
    assert len(outcome.completed) == len(outcome.lengths) == STEPS
    assert outcome.evaluated_steps[0] == 0
    assert (tmp_path / "found" / "length.png").exists()
