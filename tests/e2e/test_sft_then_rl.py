"""Supervised fine-tuning, then reinforcement learning by a run of its own that begins with its weights."""

import json
from pathlib import Path

import pytest

from launch.run_view.recorded_runs import recorded_runs
from tests.e2e.commands import SMALL, Command, with_steps

pytestmark = [pytest.mark.nightly, pytest.mark.nats, pytest.mark.timeout(400)]


def test_a_run_of_reinforcement_learning_begins_with_one_on_demonstrations(tmp_path: Path):
    row = {"prompt": "sort 21", "response": "12"}
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(row)}\n" * 32)
    settings = [*SMALL]
    settings[settings.index("--warmup.steps") + 1] = "0"
    for arguments in (
        ["--run", "sft", "--sft", "chats.jsonl", "--warmup.batch-size", "16"],
        ["--run", "rl", "--from", "sft", *with_steps(tuple(settings), 2)],
    ):
        launcher = Command(tmp_path, "local", *arguments)
        try:
            assert launcher.wait(180) == 0, launcher.said()
        finally:
            launcher.kill()
    assert "Run 'rl' begins with the weights of run sft." in launcher.said()
    sft, rl = recorded_runs([tmp_path / "runs/sft", tmp_path / "runs/rl"])
    assert (sft.state, sft.origin) == ("finished", "")
    assert (rl.state, rl.step, rl.origin) == ("finished", 2, "sft@2")
    shared = tmp_path / "runs/rl/model/manifest.json"
    assert shared.stat().st_nlink == 2
