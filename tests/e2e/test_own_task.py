"""A user's own prompts, model and reward, each of which comes later from another process; scored again."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from learner.config.model import ScratchModel
from learner.initial.scratch_model import build_model_directory
from tests.e2e.commands import ENVIRONMENT, Command

pytestmark = [pytest.mark.slow, pytest.mark.nats, pytest.mark.timeout(400)]
REWARDS = '''
import json
from actors.rewards.base import LATER, Answer

async def digits(answer: Answer) -> float:
    """The share of characters that are digits; the label and metadata must have travelled."""
    assert answer.label == "7" and answer.metadata == {"source": "mine"}
    assert [message["role"] for message in answer.messages] == ["system", "user"]
    return sum(c.isdigit() for c in answer.text) / max(1, len(answer.text))

async def later(answer: Answer):
    """Leaves the reward where the judge finds it."""
    reward = await digits(answer)
    with open("judged.jsonl", "a") as file:
        print(json.dumps({"trajectory_id": answer.task_id, "reward": reward}), file=file)
    return LATER

async def opposite(answer: Answer) -> float:
    return -1.0 - await digits(answer)
'''


def write_files_named_like_our_packages(directory: Path) -> None:
    """A run beside them must not import them."""
    for name in ("actors.py", "bus.py", "storage.py", "learner/__init__.py", "launch/cli.py"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("raise RuntimeError('a file of the user was imported for ours')\n")


@pytest.mark.nightly
def test_own_prompts_model_and_rewards_that_come_later_train_and_are_scored_again(tmp_path: Path):
    chat = [{"role": "system", "content": "digits"}, {"role": "user", "content": "one to nine"}]
    row = {"question": chat, "answer": 7, "extra": {"source": "mine"}}
    (tmp_path / "mine.jsonl").write_text((json.dumps(row) + "\n") * 3)
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    write_files_named_like_our_packages(tmp_path)
    sizes = ScratchModel(hidden_size=32, layers=1, heads=2, kv_heads=1, intermediate_size=32, context=64)
    build_model_directory(tmp_path / "model", sizes, seed=0)
    launcher = Command(
        tmp_path, "local", "--run", "mine", "--prompts", "mine.jsonl", "--reward", "my_rewards:later",
        "--data.keys.prompt", "question", "--data.keys.label", "answer", "--data.keys.metadata", "extra",
        "--model.path", "model", "--learner.steps", "3", "--sampling.max-new-tokens", "8",
        "--admission.groups-per-step", "2", "--admission.samples-per-prompt", "4",
        "--learner.loss.type", "ppo_clip", "--learner.loss.clip-eps", "0.1",
        "--actors.environment.no-sample-call",
    )  # fmt: skip
    run = tmp_path / "runs/mine"
    try:
        judge(launcher, tmp_path, run)
        assert launcher.wait(120) == 0, launcher.said()
    finally:
        launcher.kill()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["accounted"]) == (3, True), launcher.said()
    assert summary["trajectories_trained"] == 3 * 2 * 4
    assert summary["heldout_accuracy_end"] is None
    assert summary["trajectories_rejected"] == summary["messages_set_aside_reasons"] == {}
    assert json.loads((run / "config.json").read_text())["learner"]["loss"]["clip_eps"] == 0.1
    assert (run / "export" / "model.safetensors").exists()

    arguments = ("--run", "mine", "--json")
    same = rescored(tmp_path, *arguments, "--reward", "my_rewards:digits")
    assert (same["groups"], same["trajectories"], same["failed"]) == (6, 24, 0)
    assert same["changed_fraction"] == 0.0
    opposite = rescored(tmp_path, *arguments, "--reward", "my_rewards:opposite", "--from-step", "2")
    assert (opposite["groups"], opposite["changed_fraction"]) == (4, 1.0)
    assert opposite["mean_new"] == pytest.approx(-1 - opposite["mean_old"])
    assert (run / "scores/my_rewards.opposite.jsonl").exists()


def judge(launcher: Command, directory: Path, run: Path) -> None:
    """Pipe the rewards into `launch reward` as they are judged, until the run has ended."""
    judged, deadline = directory / "judged.jsonl", time.monotonic() + 240
    while not judged.exists():
        assert launcher.process.poll() is None, launcher.said()
        assert time.monotonic() < deadline, launcher.said()
        time.sleep(0.05)
    url = json.loads((run / "config.json").read_text())["bus"]["url"]
    with judged.open("rb") as found, subprocess.Popen(
        [sys.executable, "-m", "launch", "reward", "--run", "mine", "--bus", url],
        cwd=directory, stdin=subprocess.PIPE, env=ENVIRONMENT,
    ) as giving:  # fmt: skip
        while launcher.process.poll() is None:
            assert time.monotonic() < deadline, launcher.said()
            giving.stdin.write(found.read())
            giving.stdin.flush()
            time.sleep(0.05)
        giving.kill()  # it may try to reach the bus, which ended with the run


def rescored(directory: Path, *arguments: str) -> dict[str, object]:
    """Return what `launch rescore` reports."""
    command = Command(directory, "rescore", *arguments)
    try:
        assert command.wait(120) == 0, command.said()
    finally:
        command.kill()
    return json.loads(command.said().splitlines()[-1])
