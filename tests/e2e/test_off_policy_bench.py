"""`launch bench staleness` and `launch bench paired` on tiny runs of the real system."""

import json
from pathlib import Path

import pytest

from benchmarks.off_policy.cells import Cell
from benchmarks.off_policy.outcome import Outcome
from benchmarks.whole_runs.results import Results
from tests.e2e.commands import Command

pytestmark = [pytest.mark.nats, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(600)]
STEPS, LAG = 4, 2


def report(directory: Path, *arguments: str) -> dict:
    command = Command(
        directory, "bench", *arguments, "--json", "--directory", str(directory / "found"),
        "--steps", str(STEPS), "--admission.groups-per-step", "4", "--admission.samples-per-prompt", "4",
        "--warmup.steps", "2",
    )  # fmt: skip
    try:
        assert command.wait(500.0) == 0, command.said()
    finally:
        command.kill()
    [line] = [line for line in command.said().splitlines() if line.startswith("{")]
    command.output.unlink()
    return json.loads(line)


def test_a_cell_trains_on_data_of_exactly_its_age_and_is_not_run_again(tmp_path: Path):
    one = ("staleness", "--methods", "m2po", "--lags", str(LAG), "--seeds", "0")
    found = report(tmp_path, *one)
    assert (found["cells"], found["measured_now"], found["failed"]) == (1, 1, {})
    assert found["staleness_not_held"] == []
    outcome = Results(tmp_path / "found" / "cells.jsonl", Outcome.of_json).outcomes[Cell(0, 1, LAG, "m2po")]
    assert outcome.staleness == (0.0, 1.0, 2.0, 2.0)
    assert outcome.tokens_by_staleness[2] == 1.0
    assert outcome.evaluated_steps == (0, STEPS)
    again = report(tmp_path, *one, "--minutes", "0")
    assert (again["cells"], again["measured_now"], again["left"]) == (1, 0, [])


def test_a_recorded_stream_is_trained_on_by_several_methods(tmp_path: Path):
    paired = report(tmp_path, "paired", "--methods", "none,dppo_tv", "--recorded-by", "vespo", "--lag", "1")
    assert (paired["stream"], paired["steps"]) == ("vespo-lag1-reuse1-seed0", STEPS)
    assert [row["method"] for row in paired["methods"]] == ["none", "dppo_tv"]
    for row in paired["methods"]:
        assert row["batches_equal"]
        assert 0 <= row["accuracy"] < 1
        assert row["entropy_end_nats"] > 0
