"""A reward that breaks after the start ends the run soon, with its own traceback on the terminal."""

import json
from pathlib import Path

import pytest

from learner.config.model import ScratchModel
from learner.scratch_model import build_model_directory
from tests.e2e.commands import Command

# Parts of it are tested in every run: test_infra_failures.py, test_runtime.py and test_supervisor.py.
pytestmark = [pytest.mark.nightly, pytest.mark.nats, pytest.mark.timeout(300)]
REWARD = '''
from pathlib import Path

def breaks(answer):
    """Works for the sample call of the start, and never again."""
    if answer.task_id == "sample call":
        return 1.0
    return {"right": 1.0}[answer.metadata["kind"]]
'''


def test_a_reward_that_raises_in_each_rollout_ends_the_run_with_its_traceback(tmp_path: Path):
    (tmp_path / "mine.jsonl").write_text((json.dumps({"prompt": "one to nine", "label": "7"}) + "\n") * 3)
    (tmp_path / "my_rewards.py").write_text(REWARD)
    sizes = ScratchModel(hidden_size=32, layers=1, heads=2, kv_heads=1, intermediate_size=32, context=64)
    build_model_directory(tmp_path / "model", sizes, seed=0)
    launcher = Command(
        tmp_path, "local", "--run", "mine", "--prompts", "mine.jsonl", "--reward", "my_rewards:breaks",
        "--model.path", "model", "--learner.steps", "3", "--sampling.max-new-tokens", "8",
        "--admission.groups-per-step", "2", "--admission.samples-per-prompt", "4",
        "--actors.failures.after-s", "1",
    )  # fmt: skip
    try:
        assert launcher.wait(200) == 2, launcher.said()
    finally:
        launcher.kill()
    said = launcher.said()
    assert "rollouts failed" in said
    assert "by their reward: correct what failed" in said
    assert 'my_rewards.py", line 8, in breaks' in said
    assert "KeyError: 'kind'" in said
