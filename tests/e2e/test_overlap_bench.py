"""`launch bench overlap` on a tiny model: two modes in one run, and the account of all of it."""

import json
from pathlib import Path

import pytest
from commands import Command

pytestmark = [pytest.mark.slow, pytest.mark.nats, pytest.mark.timeout(900)]
STEPS, STALENESS, GROUPS, SAMPLES = 4, 2, 4, 4


def test_both_modes_are_measured_in_one_run_that_loses_nothing(tmp_path: Path):
    command = Command(
        tmp_path, "bench", "overlap", "--json", "--steps", str(STEPS), "--rounds", "1",
        "--prompt-tokens", "16", "--admission.max-staleness", str(STALENESS),
        "--admission.groups-per-step", str(GROUPS), "--admission.samples-per-prompt", str(SAMPLES),
        "--actors.environment.lengths.median", "12",
    )  # fmt: skip
    try:
        assert command.wait(800.0) == 0, command.said()
    finally:
        command.kill()
    report = json.loads(command.said().splitlines()[-1])
    assert report["ratios"].keys() == report["limited_by"].keys() == report["limits"].keys() | {"slots_idle"}
    assert report["ratios"]["async_over_sync"] > 0
    assert report["ended"] == "well"
    modes, account = report["modes"], report["account"]
    assert [turn[0] for turn in report["absolute"]["turns"]] == ["async", "sync"]
    assert modes["sync"]["staleness_max"] == 0
    assert modes["async"]["staleness_max"] <= STALENESS
    for mode in modes.values():
        assert mode["steps"] == STEPS
        assert mode["trajectories_per_s"] * mode["step_s"] == pytest.approx(GROUPS * SAMPLES)
        for idle in ("learner_idle", "engine_idle", "slots_idle"):
            assert 0 <= mode[idle] < 1, idle
    assert (account["lost"], account["trained_too_often"], account["trained_but_not_in_ledger"]) == (0, 0, 0)
    assert account["trajectories_trained"] == account["steps"] * GROUPS * SAMPLES
    assert account["max_staleness_seen"] <= STALENESS
