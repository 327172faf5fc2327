"""A learner of two ranks: they are killed, stopped, and spread over two agents; the run ends whole."""

import json
import sqlite3
import time
from pathlib import Path

import psutil
import pytest

from bus.server import free_port
from tests.e2e.commands import GROUPS, LONG, SAMPLES, SMALL, STEPS, Command, assert_whole, part, wait_for_step

pytestmark = [pytest.mark.slow, pytest.mark.nats, pytest.mark.timeout(900)]


def of_steps(settings: tuple[str, ...], steps: int) -> tuple[str, ...]:
    """The settings with another number of steps."""
    value = settings.index("--learner.steps") + 1
    return (*settings[:value], str(steps), *settings[value + 1 :])


def rank(agent: psutil.Process, number: int) -> psutil.Process:
    """The process that is this rank now, once it is there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in agent.children():
            try:
                if child.environ().get("TORCHELASTIC_RUN_ID") and _number(child) == number:
                    return child
            except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
                continue
        time.sleep(0.05)
    raise AssertionError(f"rank {number} does not run")


def _number(process: psutil.Process) -> int:
    told = process.environ()
    return int(told["SLUICE_NODE_RANK"]) * int(told["LOCAL_WORLD_SIZE"]) + int(told["LOCAL_RANK"])


def wait_for_checkpoint(run: Path) -> None:
    """Return once there is one to resume from: it is written while training goes on."""
    deadline = time.monotonic() + 60
    while not any((run / "checkpoints").glob("step_*")):
        assert time.monotonic() < deadline, "no checkpoint was written"
        time.sleep(0.05)


def wait_for_resumed(run: Path, ranks: int) -> None:
    """Return once so many went on from a checkpoint since the run began."""
    deadline = time.monotonic() + 120
    while (log := (run / "logs/learner.log").read_text()).count("resumed ") < ranks:
        assert time.monotonic() < deadline, log
        time.sleep(0.05)


def test_a_run_ends_whole_though_ranks_of_its_learner_were_killed(tmp_path: Path):
    launcher = Command(tmp_path, "local", *LONG, "--learner.world.processes", "2")
    run = tmp_path / "runs/sort"
    try:
        agent = None
        for step, number, resumed in ((2, 1, 2), (6, 0, 4)):
            wait_for_step(launcher, run, step, timeout_s=300)
            wait_for_checkpoint(run)
            agent = agent or part(launcher, "learner")
            rank(agent, number).kill()
            wait_for_resumed(run, resumed)
        assert launcher.wait(300) == 0, launcher.said()
    finally:
        launcher.kill()
    assert_whole(run, STEPS, GROUPS, SAMPLES)
    assert "part=learner" not in launcher.said()  # the agent mended it, not the supervisor
    assert (run / "logs/learner.log").read_text().count("resumed ") == 2 * 2
    assert not [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path)]
    report = trained_again(tmp_path)
    assert report["batches_equal"] == report["batches"] == STEPS
    assert report["loss_max_abs_diff"] < 1e-4, report  # other sums of the same numbers


def trained_again(directory: Path) -> dict[str, object]:
    """What `launch retrain` reports of the run, by one process."""
    retrained = Command(directory, "retrain", "--run", "sort", "--json")
    try:
        assert retrained.wait(300) == 0, retrained.said()
    finally:
        retrained.kill()
    return json.loads(retrained.said().splitlines()[-1])


def test_two_nodes_stop_together_when_one_is_told_to_and_finish_when_started_again(tmp_path: Path):
    port, master = free_port("127.0.0.1"), f"127.0.0.1:{free_port('127.0.0.1')}"
    join = ("--bus", f"nats://127.0.0.1:{port}", "--run", "world")
    started = [Command(tmp_path / "bus", "bus", "--port", str(port))]
    shared = ("--directory", str(tmp_path / "shared"), "--nodes", "2", "--master", master)

    def nodes(name: str) -> list[Command]:
        both = [
            Command(tmp_path / f"{name}-{n}", "learner", *join, *shared, "--node-rank", str(n))
            for n in (1, 0)
        ]
        started.extend(both)
        return both

    try:
        started.append(Command(tmp_path / "storage", "storage", *join, *of_steps(SMALL, 8)))
        started.append(Command(tmp_path / "actors", "actors", *join))
        first = nodes("first")
        progress = tmp_path / "shared/world/progress.json"
        wait_for_file(progress, first)
        assert [node.stop(120) if n == 0 else node.wait(120) for n, node in enumerate(first)] == [0, 0], [
            node.said() for node in first
        ]
        assert json.loads(progress.read_text())["stage"] == "rl"
        for node in nodes("second"):
            assert node.wait(400) == 0, node.said()
    finally:
        for command in started:
            command.kill()
    done = json.loads(progress.read_text())
    assert (done["stage"], done["step"]) == ("done", 8)
    assert done["trajectories_trained"] == 8 * 4 * 4
    ledger = sqlite3.connect(tmp_path / "storage/runs/world/ledger.sqlite")
    groups = dict(ledger.execute("SELECT state, count(*) FROM leases GROUP BY state"))
    ledger.close()
    assert groups["committed"] == 8 * 4


def wait_for_file(path: Path, writers: list[Command]) -> None:
    deadline = time.monotonic() + 300
    while not path.exists():
        running = all(writer.process.poll() is None for writer in writers)
        assert running, [writer.said() for writer in writers]
        assert time.monotonic() < deadline
        time.sleep(0.05)
