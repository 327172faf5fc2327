"""`launch retrain`, `launch learner --shadow` and `launch restore` on a run whose learner was killed."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bus.server.nats_server import free_port
from learner.progress import lineage
from tests.e2e.commands import Command
from tests.e2e.conftest import Refused

pytestmark = [pytest.mark.nightly, pytest.mark.nats, pytest.mark.timeout(900)]  # it begins with a whole run
STEPS = 12
SETTINGS = (
    "--preset", "sort", "--warmup.steps", "4", "--warmup.threads", "1", "--learner.steps", str(STEPS),
    "--learner.target-accuracy", "1.0",
    "--learner.checkpoint.save-every", "5", "--learner.checkpoint.keep", "3",
    "--admission.groups-per-step", "4", "--admission.samples-per-prompt", "4",
    "--evaluation.every-versions", "0", "--replay.archive", "archive",
    "--reward", "tests.e2e.long_answers:longer",
)  # fmt: skip


def wait_for_step(path: Path, step: int, learner: Command) -> None:
    """Return once a step was trained, and the checkpoint of step 5 is durable."""
    deadline = time.monotonic() + 300
    while not (step in lineage.steps(path) and (path.parent / "checkpoints/step_00000005").exists()):
        assert learner.process.poll() is None, learner.said()
        assert time.monotonic() < deadline, learner.said()
        time.sleep(0.05)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory):
    """The directory of a run "past" that has ended, whose learner was killed once, beside a shadow."""
    root = tmp_path_factory.mktemp("past")
    port = free_port("127.0.0.1")
    join = ("--bus", f"nats://127.0.0.1:{port}", "--run", "past")
    path = root / "runs/past/lineage.jsonl"
    started = [Command(root, "bus", "--port", str(port))]
    try:
        started.append(Command(root, "storage", *join, *SETTINGS))
        started.append(Command(root, "actors", *join))
        learner = Command(root, "learner", *join)
        (root / "elsewhere").mkdir()
        shadow = Command(
            root / "elsewhere", "learner", *join, "--shadow", "clipped", "--learner.loss.type", "ppo_clip"
        )
        started += [learner, shadow]
        wait_for_step(path, 7, learner)
        learner.kill()
        learner = Command(root, "learner", *join)
        started.append(learner)
        assert learner.wait(180) == 0, learner.said()
        assert shadow.wait(120) == 0, shadow.said()
        for service in started[1::-1]:
            assert service.stop() == 0, service.said()
        yield root
    finally:
        for command in started:
            command.kill()


def launch(root: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "launch", *arguments, "--run", "past"]
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=240, env=environment)


@pytest.fixture(scope="module")
def report(root: Path) -> dict[str, Any]:
    """What `launch retrain` says of the whole run."""
    done = launch(root, "retrain", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_whole_run_trains_again_bit_for_bit_in_one_process(root: Path, report: dict[str, Any]):
    assert (report["batches"], report["batches_equal"]) == (STEPS, STEPS)
    assert report["loss_max_abs_diff"] == report["grad_norm_max_abs_diff"] == 0
    assert report["weights_max_abs_diff"] == 0
    assert report["first_step_that_differs"] is None
    assert len({step["loss"] for step in report["steps"]}) > STEPS // 2  # 0 where no group has an advantage
    assert len((root / "runs/past/lineage.jsonl").read_text().splitlines()) > STEPS  # some trained twice


def test_the_weights_say_how_often_a_group_was_trained_on(root: Path):
    done = launch(root, "witness", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["trained"] == "once"
    apart = report["weights_max_abs_diff"]
    assert apart["once"] == 0 < min(apart["never"], apart["twice"])


def test_another_objective_is_tried_from_a_checkpoint(root: Path):
    flags = ("--from-step", "5", "--learner.loss.type", "ppo_clip", "--learner.loss.clip-eps", "0.01")
    done = launch(root, "retrain", "--json", *flags)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["changed"] == {
        "learner.loss.type": "ppo_clip",
        "learner.loss.clip_eps": 0.01,
        "learner.loss.centre": "behaviour",
        "learner.loss.proximal": "auto",  # which the other loss does not have
    }
    assert [step["step"] for step in report["steps"]] == list(range(6, STEPS + 1))
    assert report["batches_equal"] == STEPS - 5
    assert report["loss_max_abs_diff"] > 0


def test_another_reward_is_tried_on_what_was_rolled_out(root: Path, report: dict[str, Any]):
    done = launch(root, "rescore", "--reward", "exact", "--name", "right")
    assert done.returncode == 0, done.stderr
    done = launch(root, "retrain", "--json", "--from-step", "5", "--scores", "right")
    assert done.returncode == 0, done.stderr
    rescored = json.loads(done.stdout)
    assert rescored["changed"] == {"scores": "right"}
    recorded = report["steps"][5:]
    assert [s["step"] for s in rescored["steps"]] == [s["step"] for s in recorded]
    assert [s["reward_mean"] for s in rescored["steps"]] != [s["reward_mean"] for s in recorded]
    assert all(0 <= step["reward_mean"] <= 1 for step in rescored["steps"])


def test_the_shadow_trained_on_the_groups_of_every_step(root: Path):
    kept = root / "elsewhere/runs/past/shadows/clipped"
    seen, expected = lineage.steps(kept / "lineage.jsonl"), lineage.steps(root / "runs/past/lineage.jsonl")
    assert [s.leases for s in seen.values()] == [s.leases for s in expected.values()]
    assert len(seen) == STEPS
    progress = json.loads((kept / "progress.json").read_text())
    assert (progress["step"], progress["steps_retired"]) == (STEPS, 0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("retrain", "--from-step", "3"), "no checkpoint up to step 3 in "),
        (("retrain", "--to-step", "99"), "lacks step 13: it holds steps 1 to 12"),
        (("retrain", "--from-step", "12"), "from step 12 to 12 there is nothing to train"),
        (("retrain", "--directory", "nowhere"), "no run 'past' here"),
        (("retrain", "--scores", "none"), "`launch rescore` makes one"),
        (("retrain", "--learner.loss.type", "ppo_clp"), "did you mean 'ppo_clip'?"),
        (("witness", "nonsense"), "nonsense names no group: write it as g00000012"),
        (("learner", "--from-checkpoint", "x"), "--from-checkpoint is for a --shadow"),
        (("learner", "--shadow", "a b"), "shadow name 'a b'"),
        (("learner", "--shadow", "a", "--nproc", "2"), "shadow 'a' is one process"),
        (("learner", "--shadow", "a", "--stopped-status", "75"), "--stopped-status is for a learner"),
        (("learner", "--shadow", "a", "--from-checkpoint", "x"), "--from-checkpoint x is not a checkpoint"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    refused: Refused, root: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], message: str
):
    monkeypatch.chdir(root)
    assert message in refused(*flags, "--run", "past").splitlines()[0]


def test_each_trajectory_says_the_step_that_trained_on_it(root: Path):
    done = launch(root, "tail", "--export", "all.jsonl")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (root / "all.jsonl").read_text().splitlines()]
    steps = lineage.steps(root / "runs/past/lineage.jsonl")
    expected = {lease: step for step, line in steps.items() for lease in line.leases}
    assert {row["lease_id"]: row["step"] for row in rows if row["step"] is not None} == expected
    for row in rows:
        is_trained = row["lease_id"] in expected
        told = "trained in step " if is_trained else "not trained, because the run is finished"
        assert row["training"].startswith(told), row
        assert (row["advantage"] is not None) == is_trained
        assert row["label"] == "".join(sorted(row["prompt"].split("sort ")[1].split("<")[0]))


def test_nothing_is_restored_where_nothing_was_retired(root: Path):
    done = launch(root, "restore")
    assert (done.returncode, done.stdout) == (0, "nothing was retired\n"), done.stderr
