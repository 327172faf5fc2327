"""Presets of several turns and agents, from the command line to what is stored."""

import json
import subprocess
import sys
from contextlib import closing

import pytest

from storage.store.segments import Segment
from tests.e2e.commands import ENVIRONMENT, Command, wait_for_step

pytestmark = [pytest.mark.nats, pytest.mark.slow, pytest.mark.nightly]
SMALL = (
    "--warmup.batch-size", "16", "--evaluation.every-versions", "0", "--learner.steps", "500",
    "--admission.groups-per-step", "2", "--admission.samples-per-prompt", "2",
    "--learner.target-accuracy", "none",
)  # fmt: skip


def trained(directory, preset, steps, *flags):
    """Run a preset until it has taken these steps; return trajectories that it stored."""
    run = Command(directory, "local", "--preset", preset, "--directory", str(directory), *SMALL, *flags)
    try:
        wait_for_step(run, directory / preset, steps, timeout_s=240)
        return tail(directory, preset)
    finally:
        run.kill()


def tail(directory, run):
    command = [sys.executable, "-m", "launch", "tail", "--run", run, "--directory", str(directory)]
    told = subprocess.run(
        [*command, "--n", "64", "--once", "--json"],
        capture_output=True, text=True, timeout=60, env=ENVIRONMENT, cwd=directory, check=True,
    )  # fmt: skip
    return [json.loads(line) for line in told.stdout.splitlines()]


def test_nim_is_played_against_an_earlier_version_that_is_not_trained(tmp_path):
    moves = ("--warmup.steps", "20")  # which are mostly within the rules, so that games go on
    past = ("--actors.opponents.past.version", "latest - 2", "--actors.opponents.past.refresh-every", "1")
    shown = trained(tmp_path, "nim", 5, *moves, *past)
    found = {(t["policy"], t["trained"], bool(t["masked_tokens"])) for t in shown}
    assert found == {("default", True, True), ("past", False, False)}
    assert {t["agent"] for t in shown if t["trained"]} == {"player-1", "player-2"}


def test_guessing_goes_on_for_several_turns(tmp_path):
    shown = trained(tmp_path, "guess", 2, "--warmup.steps", "2")
    assert max(len([part for part in t["parts"] if part["by"] == "policy"]) for t in shown) > 1


@pytest.mark.parametrize("preset", ["panel", "agent"])
def test_a_panel_trains_all_of_its_agents_also_as_a_program_of_somebody_elses(tmp_path, preset):
    shown = trained(tmp_path, preset, 2, "--warmup.steps", "2")
    agents = {f"{role}-{n}" for role in ("solver", "rewriter") for n in (1, 2)} | {"selector"}
    assert {t["agent"] for t in shown} == agents


def test_a_debate_trains_all_debaters_over_two_rounds(tmp_path):
    shown = trained(tmp_path, "debate", 2, "--warmup.steps", "2")
    assert {t["agent"] for t in shown} == {f"debater-{n}" for n in (1, 2, 3)}
    assert max(len([part for part in t["parts"] if part["by"] == "policy"]) for t in shown) == 2


@pytest.mark.timeout(600)
def test_counting_trains_on_pictures_that_siblings_share_and_trains_again_bit_for_bit(tmp_path):
    small = ("--warmup.steps", "2", "--warmup.batch-size", "16",
             "--admission.groups-per-step", "2", "--admission.samples-per-prompt", "2",
             "--evaluation.every-versions", "0", "--learner.target-accuracy", "none")  # fmt: skip
    started = ("local", "--preset", "count", "--directory", str(tmp_path), *small)
    for steps, said in (("1", ""), ("1", "it has trained 1 steps"), ("2", "goes on to step 2")):
        run = Command(tmp_path, *started, "--learner.steps", steps)
        try:
            assert run.wait(280) == 0, run.said()
        finally:
            run.kill()
        assert said in run.said()
    trajectories = pictures = 0
    for path in sorted((tmp_path / "count" / "replay").glob("*/segment_*")):
        with closing(Segment(path)) as segment:
            stored = [segment.trajectory(row) for row in range(segment.summary.trajectories)]
            pictures += len(list(segment.images))
        assert {len(one.images) for one in stored} == {1}
        trajectories += len(stored)
    assert 0 < pictures <= trajectories // 2
    metrics = [json.loads(line) for line in (tmp_path / "count" / "metrics.jsonl").read_text().splitlines()]
    differences = [one["policy/mismatch_nats"] for one in metrics if "policy/mismatch_nats" in one]
    assert differences
    assert max(differences) < 1e-5
    again = subprocess.run(
        [sys.executable, "-m", "launch", "retrain", "--run", "count", "--directory", str(tmp_path), "--json"],
        capture_output=True, text=True, timeout=280, env=ENVIRONMENT, cwd=tmp_path, check=True,
    )  # fmt: skip
    report = json.loads(again.stdout)
    assert (report["batches"], report["batches_equal"], report["weights_max_abs_diff"]) == (2, 2, 0)
