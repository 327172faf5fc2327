"""A run whose engines sample from other weights than the learner has is paused, and ends with its name."""

import json
import re
from pathlib import Path

import pytest

from tests.e2e.commands import SMALL, Command, with_steps

# By day test_policy_alarm.py has the rule, and test_ess_brake.py what storage makes of it.
pytestmark = [pytest.mark.nightly, pytest.mark.nats, pytest.mark.timeout(400)]
PLANTED = Path(__file__).parents[1] / "launch/chaos/planted"


def test_a_run_whose_engines_have_other_weights_is_paused_and_ends_with_the_remedy(tmp_path: Path):
    environment = "--supervision.environment.actors"
    launcher = Command(
        tmp_path, "local", *with_steps(SMALL, 60), "--learner.diagnostics.mismatch-end-steps", "12",
        "--learner.entropy-coef", "0.1",  # so that every step moves the weights, whatever the rewards are
        f"{environment}.PYTHONPATH", str(PLANTED), f"{environment}.SLUICE_PLANT", "perturbed",
    )  # fmt: skip
    try:
        assert launcher.wait(300) == 2, launcher.said()
    finally:
        launcher.kill()
    said = launcher.said()
    assert "ALARM: engine-0 differs from the learner by" in said
    assert re.search(r"learner: ALARM: engines and learner disagree about the policy, \d+ step", said), said
    assert "policy mismatch: engines and learner disagree about the policy, 12 steps in a row" in said
    assert "or raise learner.diagnostics.largest_mismatch_nats" in said
    run = tmp_path / "runs/sort"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert 11 <= max(row["step"] for row in rows if row.get("train/stage") == "rl") <= 20
    counted = [json.loads(line) for line in (run / "counters.jsonl").read_text().splitlines()]
    assert max(row.get("engine/probe_alarms", 0) for row in counted) == 1
