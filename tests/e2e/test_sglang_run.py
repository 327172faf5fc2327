"""`launch local` with SGLang as the engine: a whole run, every trajectory accounted for."""

import json
from pathlib import Path

import pytest

from tests.e2e.commands import SMALL, Command

pytestmark = [pytest.mark.sglang, pytest.mark.nats, pytest.mark.timeout(580)]


def probed(run: Path) -> list[float]:
    """How far engine and learner were apart at each comparison of the probe's log-probs, in nats."""
    counters = map(json.loads, (run / "counters.jsonl").read_text().splitlines())
    return [row["engine/probe_nats"] for row in counters if "engine/probe_nats" in row]


def test_a_run_on_sglang_trains_and_accounts_for_everything(tmp_path: Path):
    local = Command(
        tmp_path, "local", *SMALL, "--run", "served", "--actors.engine.type", "sglang",
        "--actors.engine.server.max-running-requests", "32", "--learner.batch.no-skip-zero-advantages",
    )  # fmt: skip
    try:
        assert local.wait(540.0) == 0, local.said()
    finally:
        local.kill()
    run = tmp_path / "runs/served"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["accounted"]
    assert (summary["stage"], summary["steps"]) == ("done", 4)
    assert summary["groups"]["trained"] == 16
    assert summary["groups_rejected"] == {}
    assert summary["max_staleness_seen"] <= summary["max_staleness_allowed"]
    rows = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
    mismatches = [row["policy/mismatch_nats"] for row in rows if "policy/mismatch_nats" in row]
    assert mismatches, "some tokens were drawn by the weights they were trained at"
    assert max(mismatches) < 1e-5
    drawn_by = {
        row["policy_version"]: (row["oldest_version"], row["newest_version"])
        for row in rows
        if row["kind"] == "evaluation"
    }
    assert {0, 1, 3, 5} <= drawn_by.keys(), "the servers that roll out answered held-out prompts"
    assert (drawn_by[1], drawn_by[5]) == ((1, 1), (5, 5)), "nothing was published while the learner waited"
    assert max(probed(run)) < 1e-4
    [log] = (run / "logs").glob("engine-*.log")
    assert "Decode batch" in log.read_text()


@pytest.mark.nightly
def test_counting_on_sglang_trains_on_pictures_as_the_learner_sees_them(tmp_path: Path):
    local = Command(
        tmp_path, "local", "--preset", "count", "--directory", str(tmp_path / "runs"), "--warmup.steps", "2",
        "--warmup.batch-size", "16", "--learner.steps", "4", "--learner.target-accuracy", "none",
        "--admission.groups-per-step", "4", "--admission.samples-per-prompt", "4",
        "--evaluation.every-versions", "2", "--actors.engine.type", "sglang",
    )  # fmt: skip
    try:
        assert local.wait(540.0) == 0, local.said()
    finally:
        local.kill()
    run = tmp_path / "runs/count"
    assert json.loads((run / "summary.json").read_text())["accounted"]
    rows = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
    mismatches = [row["policy/mismatch_nats"] for row in rows if "policy/mismatch_nats" in row]
    assert mismatches, "some tokens were drawn by the weights they were trained at"
    assert max(mismatches) < 1e-5
    assert max(probed(run)) < 1e-4
    assert any(row["kind"] == "evaluation" for row in rows)


@pytest.mark.nightly
def test_a_run_whose_server_adds_the_adapters_itself_trains_on_what_the_learner_computes(tmp_path: Path):
    local = Command(
        tmp_path, "local", *SMALL, "--run", "adapted", "--actors.engine.type", "sglang",
        "--actors.engine.adapter", "loaded", "--learner.lora.rank", "4", "--learner.optimizer.lr", "1e-3",
        "--learner.lora.targets", "q_proj", "--learner.lora.targets", "down_proj",
    )  # fmt: skip
    try:
        assert local.wait(540.0) == 0, local.said()
    finally:
        local.kill()
    run = tmp_path / "runs/adapted"
    assert json.loads((run / "summary.json").read_text())["accounted"]
    rows = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
    mismatches = [row["policy/mismatch_nats"] for row in rows if "policy/mismatch_nats" in row]
    assert mismatches, "some tokens were drawn by the weights they were trained at"
    assert max(mismatches) < 1e-5
    [log] = (run / "logs").glob("engine-*.log")
    assert log.read_text().count("POST /load_lora_adapter_from_tensors") >= 4
    assert max(probed(run)) < 1e-4
