"""A run of two trained policies, one of whose learners is killed, and is done before the other."""

import json
from contextlib import closing
from pathlib import Path

import pytest
from safetensors.torch import load_file

from learner.progress import lineage
from storage.disk.run_directory import RunDirectory
from storage.settings.replay import ReplayConfig
from storage.store.replay import ReplayStore
from tests.e2e.commands import Command

pytestmark = [pytest.mark.slow, pytest.mark.nats, pytest.mark.timeout(2400)]
STEPS, RIVAL_STEPS, GROUPS, SAMPLES = 9, 5, 2, 4
"""The run's own policy needs more leases of the other than that has before it is done."""
SMALL = (
    "--preset", "duel", "--warmup.steps", "20", "--warmup.batch-size", "16",
    "--evaluation.every-versions", "0",
    "--admission.groups-per-step", str(GROUPS), "--admission.samples-per-prompt", str(SAMPLES),
    "--learner.target-accuracy", "none", "--learner.checkpoint.save-every", "2",
    "--learner.steps", str(STEPS), "--policies.rival.learner.steps", str(RIVAL_STEPS),
    "--policies.rival.warmup.steps", "21",
    "--policies.rival.learner.before-step.function", "killing:kill_once",
)  # fmt: skip
KILLING = """
import os, pathlib, signal


def kill_once(step, groups, optimizer):
    if step == 4 and not (killed := pathlib.Path("killed")).exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""
"""The module of a hook that kills the learner before a step behind its first checkpoint."""


def trained_strands(run: RunDirectory) -> set[tuple[str, str]]:
    """Policy and agent of each stored trajectory that could be trained."""
    found = set()
    for shard in range(ReplayConfig().shards):
        with closing(ReplayStore.open(run.replay(shard), writable=False)) as store:
            found |= {(t.policy, t.agent) for t in store.read(store.completed) if t.is_trained}
    return found


def assert_trained_apart(own: Path, rival: Path) -> None:
    """Assert that each learner took all of its steps, each group once, on strands of its own policy alone."""
    summary = json.loads((own / "summary.json").read_text())
    assert (summary["steps"], summary["accounted"]) == (STEPS, True)
    assert summary["max_staleness_seen"] <= summary["max_staleness_allowed"]
    assert lineage.resumes(own / "lineage.jsonl") == 0
    assert lineage.resumes(rival / "lineage.jsonl") == 1

    progress = json.loads((rival / "progress.json").read_text())
    assert (progress["stage"], progress["step"]) == ("done", RIVAL_STEPS)
    assert progress["max_staleness_seen"] <= summary["max_staleness_allowed"]
    for run, steps in ((own, STEPS), (rival, RIVAL_STEPS)):
        trained = [lease for step in lineage.steps(run / "lineage.jsonl").values() for lease in step.leases]
        assert len(trained) == len(set(trained)) == steps * GROUPS

    for run, name in ((own, "default"), (rival, "rival")):
        strands = trained_strands(RunDirectory(run.parent, run.name))
        assert strands == {(name, "player-1"), (name, "player-2")}
    for run in (own, rival):
        rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        assert any(row.get("train/stage") == "rl" and row["train/grad_norm"] > 0 for row in rows)
    weights = [load_file(run / "export/model.safetensors") for run in (own, rival)]
    assert all(not weights[0][name].equal(weights[1][name]) for name in weights[0] if "proj" in name)


@pytest.mark.nightly
def test_each_learner_trains_its_own_strands_once_though_one_is_killed(tmp_path: Path):
    own, rival = tmp_path / "runs/duel", tmp_path / "runs/duel__rival"
    (tmp_path / "killing.py").write_text(KILLING)
    launcher = Command(tmp_path, "local", *SMALL)
    try:
        assert launcher.wait(1800) == 0, launcher.said()
    finally:
        launcher.kill()
    assert_trained_apart(own, rival)
