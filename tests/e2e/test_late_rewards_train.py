"""A run whose every reward comes from another process, later; its answers are scored again afterwards."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.commands import SMALL, Command

pytestmark = [pytest.mark.slow, pytest.mark.nats]
REWARDS = '''
import json
from actors.rewards.base import LATER, Answer
from actors.rewards.matching import exact

def later(answer: Answer):
    """Leaves the reward where the judge finds it."""
    if answer.task_id.startswith("heldout"):
        return exact(answer)
    with open("judged.jsonl", "a") as file:
        print(json.dumps({"trajectory_id": answer.task_id, "reward": exact(answer)}), file=file)
    return LATER

def opposite(answer: Answer) -> float:
    return 1.0 - exact(answer)
'''


def test_run_trains_on_rewards_that_come_later_and_is_scored_again(tmp_path: Path):
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    launcher = Command(tmp_path, "local", *SMALL, "--run", "late", "--reward", "my_rewards:later")
    try:
        judge(launcher, tmp_path)
        assert launcher.wait(30) == 0, launcher.said()
    finally:
        launcher.kill()
    summary = json.loads((tmp_path / "runs/late/summary.json").read_text())
    assert (summary["steps"], summary["accounted"]) == (4, True), launcher.said()
    assert summary["trajectories_trained"] == 4 * 4 * 4
    assert summary["messages_set_aside_reasons"] == {}

    arguments = ("--run", "late", "--json")
    same = launch(tmp_path, "rescore", *arguments, "--reward", "exact")
    assert (same["groups"], same["trajectories"], same["failed"]) == (16, 64, 0)
    assert same["changed_fraction"] == 0.0
    opposite = launch(tmp_path, "rescore", *arguments, "--reward", "my_rewards:opposite", "--from-step", "2")
    assert (opposite["groups"], opposite["changed_fraction"]) == (12, 1.0)
    assert opposite["mean_new"] == pytest.approx(1 - opposite["mean_old"])
    assert (tmp_path / "runs/late/scores/my_rewards.opposite.jsonl").exists()


def judge(launcher: Command, directory: Path) -> None:
    """Pipe the rewards into `launch reward` as they are judged, until the run has ended."""
    judged, config = directory / "judged.jsonl", directory / "runs/late/config.json"
    deadline = time.monotonic() + 240
    while not judged.exists():
        assert launcher.process.poll() is None, launcher.said()
        assert time.monotonic() < deadline, launcher.said()
        time.sleep(0.05)
    url = json.loads(config.read_text())["bus"]["url"]
    with judged.open("rb") as found, subprocess.Popen(
        [sys.executable, "-m", "launch", "reward", "--run", "late", "--bus", url],
        cwd=directory, stdin=subprocess.PIPE,
    ) as giving:  # fmt: skip
        while launcher.process.poll() is None:
            assert time.monotonic() < deadline, launcher.said()
            giving.stdin.write(found.read())
            giving.stdin.flush()
            time.sleep(0.05)
        giving.kill()  # it may try to reach the bus, which ended with the run


def launch(directory: Path, *arguments: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "launch", *arguments],
        cwd=directory, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
