"""A whole run whose agents' programs work in containers goes on when their daemon starts again."""

import json
import subprocess
from contextlib import ExitStack

import psutil
import pytest

from learner.config.model import ScratchModel
from learner.initial.scratch_model import build_model_directory
from tests.actors.episode_sandboxes.daemons import IMAGE, daemon_of, image_of_python, started_daemon
from tests.e2e.commands import Command, assert_whole, wait_for_step

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.nats, pytest.mark.timeout(900)]
STEPS, GROUPS, SAMPLES = 5, 2, 4
"""With the bound on staleness more steps than could be trained by what was rolled out before."""
PROGRAM = """
import json, os, time, urllib.request

def answer(messages):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    body = json.dumps({"model": "any", "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

messages = [{"role": "user", "content": json.load(open(os.environ["SLUICE_TASK"]))["prompt"]}]
first = answer(messages)
time.sleep(1)
answer([*messages, first, {"role": "user", "content": "again"}])
"""


def test_a_daemon_that_starts_again_costs_its_episodes_and_nothing_else(tmp_path):
    (tmp_path / "agent.py").write_text(PROGRAM)
    prompts = (json.dumps({"prompt": f"digits {number}", "label": "7"}) + "\n" for number in range(999))
    (tmp_path / "mine.jsonl").write_text("".join(prompts))
    sizes = ScratchModel(hidden_size=32, layers=1, heads=2, kv_heads=1, intermediate_size=32, context=96)
    build_model_directory(tmp_path / "model", sizes, seed=0)
    with daemon_of("docker", image_of_python()) as socket, ExitStack() as further:
        run = Command(
            tmp_path, "local", "--run", "boxes", "--prompts", "mine.jsonl", "--model.path", "model",
            "--agent", "python3 -S agent.py", "--reward", "random",
            "--actors.environment.sandbox.backend.type", "docker",
            "--actors.environment.sandbox.backend.image", IMAGE,
            "--actors.environment.sandbox.backend.socket", str(socket),
            "--learner.steps", str(STEPS), "--sampling.max-new-tokens", "8",
            "--admission.groups-per-step", str(GROUPS), "--admission.samples-per-prompt", str(SAMPLES),
            "--admission.max-staleness", "1",
        )  # fmt: skip
        directory = tmp_path / "runs/boxes"
        try:
            wait_for_step(run, directory, 1, timeout_s=240)
            daemon = psutil.Process(int((socket.parent / "pid").read_text()))
            daemon.terminate()
            psutil.wait_procs([daemon], 60)
            further.enter_context(started_daemon("docker", socket.parent))
            assert run.wait(timeout_s=400) == 0, run.said()
            left = subprocess.check_output(["docker", "-H", f"unix://{socket}", "ps", "-aq"])
        finally:
            run.kill()
    assert left == b""
    assert_whole(directory, STEPS, GROUPS, SAMPLES)
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["groups_rejected"] == {"rollout_failed": summary["groups"]["rejected"]} != {}
    assert "environment_error" in run.said(), "it is told how episodes ended"
