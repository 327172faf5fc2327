"""A run whose actors have several engines each."""

import json
from pathlib import Path

import pytest

from tests.e2e.commands import SMALL, Command

pytestmark = [pytest.mark.slow, pytest.mark.nats, pytest.mark.timeout(600)]


def test_a_run_trains_on_two_engines_that_take_weights_in_turn(tmp_path: Path):
    launcher = Command(
        tmp_path, "local", "--run", "fleet", *SMALL,
        "--actors.fleet.engines", "2", "--actors.mask-older-versions", "1",
    )  # fmt: skip
    try:
        assert launcher.wait(500) == 0, launcher.said()
    finally:
        launcher.kill()
    run = tmp_path / "runs/fleet"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["trajectories_trained"] == 4 * 4 * 4
    assert summary["max_staleness_seen"] <= summary["max_staleness_allowed"]
    said = "\n".join(path.read_text(errors="replace") for path in run.rglob("*.log"))
    assert {name for name in ("engine-0", "engine-1") if f"engine={name}" in said} == {"engine-0", "engine-1"}
    assert "engine_lost" not in said
