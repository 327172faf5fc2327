"""A reward that breaks after the start ends the run soon, with its own traceback on the terminal."""

import json
from pathlib import Path

import pytest

from bus.server.nats_server import free_port
from launch.run_view.recorded_runs import recorded_runs
from learner.config.model import ScratchModel
from learner.initial.scratch_model import build_model_directory
from tests.e2e.commands import Command, wait_until

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


SETTINGS = (
    "--run", "mine", "--prompts", "mine.jsonl", "--reward", "my_rewards:breaks", "--model.path", "model",
    "--learner.steps", "3", "--sampling.max-new-tokens", "8", "--admission.groups-per-step", "2",
    "--admission.samples-per-prompt", "4", "--actors.failures.after-s", "1",
)  # fmt: skip


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A directory with prompts, a model, and a reward that works once."""
    (tmp_path / "mine.jsonl").write_text((json.dumps({"prompt": "one to nine", "label": "7"}) + "\n") * 3)
    (tmp_path / "my_rewards.py").write_text(REWARD)
    sizes = ScratchModel(hidden_size=32, layers=1, heads=2, kv_heads=1, intermediate_size=32, context=64)
    build_model_directory(tmp_path / "model", sizes, seed=0)
    return tmp_path


def test_a_reward_that_raises_in_each_rollout_ends_the_run_with_its_traceback(broken):
    launcher = Command(broken, "local", *SETTINGS)
    try:
        assert launcher.wait(200) == 2, launcher.said()
    finally:
        launcher.kill()
    assert_told(launcher.said())
    [run] = recorded_runs([broken / "runs" / "mine"])
    assert run.state == "failed"
    assert "KeyError: 'kind'" in run.problem


def test_an_actor_of_a_separate_command_ends_by_its_reward_and_storage_says_why(broken):
    port = free_port("127.0.0.1")
    started = [Command(broken, "bus", "--port", str(port))]
    where = ("--bus", f"nats://127.0.0.1:{port}")
    try:
        wait_until(lambda: "bus_ready" in started[0].said(), "the bus", started[0])
        started.append(Command(broken, "storage", *where, *SETTINGS))
        named = (*where, "--run", "mine")
        started += [Command(broken, role, *named) for role in ("learner", "actors")]
        assert started[-1].wait(200) == 2, started[-1].said()
        assert_told(started[-1].said())
        wait_until(lambda: "actor_ended" in started[1].said(), "the reason in storage's log", *started[:2])
        wait_until(
            lambda: "groups_do_not_come" in started[2].said(), "the reason in the learner's log", *started[:3]
        )
        status = Command(broken, "status", *named)
        assert status.wait(60) == 1, status.said()
        alarm = status.said().partition("storage: ALARM: ")[2]
        assert "ended: of the latest" in alarm
        assert "KeyError: 'kind'" in alarm
        assert "unless another one comes within 300 s, the learner ends too" in " ".join(alarm.split())
    finally:
        for command in started:
            command.kill()


def assert_told(said: str) -> None:
    """Assert that a terminal shows what failed, and where."""
    assert "failed by their" in said
    assert "by their reward: correct what failed" in said
    assert 'my_rewards.py", line 8, in breaks' in said
    assert "KeyError: 'kind'" in said
