"""A program starts a run with prompts and a reward of its own, as a notebook does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.nats, pytest.mark.timeout(300)]
SMALL = (
    'learner={"steps": 2}, admission={"groups_per_step": 2, "samples_per_prompt": 4}, '
    'sampling={"max_new_tokens": 8}, evaluation={"every_versions": 0}'
)
PROGRAM = f"""
import launch

WORTH = {{"a": 1.0}}

def reward(answer):
    return sum(WORTH.get(letter, 0.0) for letter in answer.text)

if __name__ == "__main__":
    with launch.start(run="mine", prompts=["one", "two", "three"], reward=reward, {SMALL}) as run:
        result = run.wait(200)
    assert (result.stage, result.steps) == ("done", 2), result
    assert {{trajectory.reward for trajectory in run.trajectories()}} != {{0.0}}
"""


def test_a_reward_of_the_program_itself_scores_the_answers_to_its_prompts(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(
        [sys.executable, program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
