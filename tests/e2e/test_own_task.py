"""A user's own prompts and reward, with a model directory of their own."""

import json
from pathlib import Path

import pytest

from learner.config.model import ScratchModel
from learner.scratch_model import build_model_directory
from tests.e2e.commands import Command

pytestmark = [pytest.mark.slow, pytest.mark.nats]
REWARD = '''
from actors.rewards.base import Answer

async def digits(answer: Answer) -> float:
    """The share of characters that are digits; the label and metadata must have travelled."""
    assert answer.label == "7" and answer.metadata == {"source": "mine"}
    assert [message["role"] for message in answer.messages] == ["system", "user"]
    return sum(c.isdigit() for c in answer.text) / max(1, len(answer.text))
'''


def write_files_named_like_our_packages(directory: Path) -> None:
    """A run beside them must not import them."""
    for name in ("actors.py", "bus.py", "storage.py", "learner/__init__.py", "launch/cli.py"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("raise RuntimeError('a file of the user was imported for ours')\n")


def test_own_prompts_reward_and_model_train(tmp_path: Path):
    chat = [{"role": "system", "content": "digits"}, {"role": "user", "content": "one to nine"}]
    row = {"question": chat, "answer": 7, "extra": {"source": "mine"}}
    (tmp_path / "mine.jsonl").write_text((json.dumps(row) + "\n") * 3)
    (tmp_path / "my_rewards.py").write_text(REWARD)
    write_files_named_like_our_packages(tmp_path)
    sizes = ScratchModel(hidden_size=32, layers=1, heads=2, kv_heads=1, intermediate_size=32, context=64)
    build_model_directory(tmp_path / "model", sizes, seed=0)
    launcher = Command(
        tmp_path, "local", "--run", "mine", "--prompts", "mine.jsonl", "--reward", "my_rewards:digits",
        "--data.keys.prompt", "question", "--data.keys.label", "answer", "--data.keys.metadata", "extra",
        "--model.path", "model", "--learner.steps", "3", "--sampling.max-new-tokens", "8",
        "--admission.groups-per-step", "2", "--admission.samples-per-prompt", "4",
        "--learner.loss.type", "ppo_clip", "--learner.loss.clip-eps", "0.1",
    )  # fmt: skip
    try:
        assert launcher.wait(180) == 0, launcher.said()
    finally:
        launcher.kill()
    run = tmp_path / "runs/mine"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["trajectories_trained"] == 3 * 2 * 4
    assert summary["heldout_accuracy_end"] is None
    assert summary["trajectories_rejected"] == {}
    assert json.loads((run / "config.json").read_text())["learner"]["loss"]["clip_eps"] == 0.1
    assert (run / "export" / "model.safetensors").exists()
