"""A program that was written for OpenAI's API is trained as it is."""

import json
import time
from pathlib import Path

import psutil
import pytest

from learner.config.model import ScratchModel
from learner.scratch_model import build_model_directory
from tests.e2e.commands import Command, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.nats, pytest.mark.timeout(400)]
STEPS, GROUPS, SAMPLES = 2, 2, 4
PROGRAM = """
import json, os, urllib.request

def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "x-stainless-retry-count": "0"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))

def answer(messages):
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return post(url, {"model": "gpt-4o", "messages": messages, "temperature": 0.2})["choices"][0]["message"]

task = json.load(open(os.environ["SLUICE_TASK"]))
messages = [{"role": "user", "content": task["prompt"]}]
first = answer(messages)
second = answer([*messages, first, {"role": "user", "content": "again"}])
digits = sum(c.isdigit() for c in first["content"] + second["content"])
post(os.environ["SLUICE_REWARD_URL"], {"reward": digits / 16, "components": {"digits": digits}})
"""


SLEEPING = """
import os, pathlib, time
pathlib.Path(os.environ["BEGUN"], str(os.getpid())).touch()
time.sleep(600)
"""


def command_of(directory: Path, program: str, *more: str) -> Command:
    """Return a run of a program on a tiny model, which ends after `STEPS` steps."""
    (directory / "agent.py").write_text(program)
    (directory / "mine.jsonl").write_text((json.dumps({"prompt": "digits", "label": "7"}) + "\n") * 3)
    sizes = ScratchModel(hidden_size=32, layers=1, heads=2, kv_heads=1, intermediate_size=32, context=96)
    build_model_directory(directory / "model", sizes, seed=0)
    return Command(
        directory, "local", "--run", "agents", "--prompts", "mine.jsonl", "--agent", "python3 -S agent.py",
        "--model.path", "model", "--learner.steps", str(STEPS), "--sampling.max-new-tokens", "8",
        "--admission.groups-per-step", str(GROUPS), "--admission.samples-per-prompt", str(SAMPLES),
        "--admission.max-staleness", "1", *more,
    )  # fmt: skip


def test_ctrl_c_ends_a_run_of_many_programs_within_seconds(tmp_path: Path):
    begun = tmp_path / "begun"
    begun.mkdir()
    variable = ("--actors.environment.variables.BEGUN", str(begun))
    launcher = command_of(tmp_path, SLEEPING, *variable)
    try:
        wait_until(lambda: len(list(begun.iterdir())) == 2 * GROUPS * SAMPLES, "its programs", launcher)
        began = time.monotonic()
        assert launcher.stop(60) == 0, launcher.said()
        assert time.monotonic() - began < 30, launcher.said()  # not the whole time that a part may take
    finally:
        launcher.kill()
    assert "part_killed" not in launcher.said()
    assert "Stopping: each process saves or hands back what it began." in launcher.said()
    assert not [path for path in begun.iterdir() if psutil.pid_exists(int(path.name))]


def test_program_is_trained_as_it_is_with_the_rewards_it_posts(tmp_path: Path):
    launcher = command_of(tmp_path, PROGRAM, "--actors.environment.programs-at-once", "4")
    run = tmp_path / "runs/agents"
    try:
        assert launcher.wait(300) == 0, launcher.said()
    finally:
        launcher.kill()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["accounted"]) == (STEPS, True), launcher.said()
    assert summary["groups"]["trained"] == STEPS * GROUPS
    assert summary["trajectories_trained"] == STEPS * GROUPS * SAMPLES  # both turns are in one of them
    assert summary["messages_set_aside_reasons"] == {}
    actors_log = next((run / "logs").glob("actors*")).read_text()
    assert "sampling_is_the_runs" in actors_log  # the program asked for another temperature
