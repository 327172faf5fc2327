"""A program that was written for OpenAI's API is trained as it is; Ctrl-C ends a run of many programs."""

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from launch.local.local import MONITORED
from launch.run_view.recorded_runs import recorded_runs
from learner.config.model import ScratchModel
from learner.initial.scratch_model import build_model_directory
from tests.actors.environments.agent_programs import running
from tests.e2e.commands import Command, wait_for_step, wait_until
from tests.launch.health_answers import get, numbers

pytestmark = [pytest.mark.slow, pytest.mark.nats, pytest.mark.timeout(400)]
STEPS, GROUPS, SAMPLES = 2, 2, 4
PROGRAM = """
import json, os, pathlib, sys, time, urllib.request

def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "x-stainless-retry-count": "0"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))

def answer(messages):
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return post(url, {"model": "gpt-4o", "messages": messages, "temperature": 0.2})["choices"][0]["message"]

task = json.load(open(os.environ["SLUICE_TASK"]))
if task["prompt"] == "sleep":
    pathlib.Path(os.environ["ASLEEP"], str(time.time_ns())).touch()
    time.sleep(600)
messages = [{"role": "user", "content": task["prompt"]}]
first = answer(messages)
second = answer([*messages, first, {"role": "user", "content": "again"}])
digits = sum(c.isdigit() for c in first["content"] + second["content"])
post(json.load(sys.stdin)["reward_url"], {"reward": digits / 16, "components": {"digits": digits}})
"""

METRICS = {
    "bus": {"sluice_bus_restarts_total", "process_open_fds"},
    "storage": {
        "sluice_storage_leases_issued_total", "sluice_storage_leases_rolling_out",
        "sluice_storage_tasks_pending", "sluice_storage_retained_bytes",
        "sluice_bus_messages_received_total",
    },
    "actors": {
        "sluice_actors_tokens_generated_total", "sluice_actors_policy_version",
        "sluice_actors_engine_busy_seconds_total", "sluice_actors_trajectories_total",
    },
    "learner": {
        "sluice_learner_reward_mean", "sluice_learner_train_loss", "sluice_learner_policy_version",
        "sluice_learner_staleness_mean_versions", "sluice_learner_trained_tokens_per_second",
    },
}  # fmt: skip
"""Metrics that each part must show."""


@dataclass(frozen=True)
class Stopped:
    """A run that was ended by Ctrl-C while its programs slept."""

    directory: Path
    said: str
    stopping_s: float
    sleepers: int
    """Number of its programs at that time."""
    left: list[int]
    """Those of them that are still there."""
    answers: dict[str, dict[str, tuple[int, str]]]
    """Status and text of what each of its parts answered before, by its name and the path."""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """A run on a tiny model, whose programs end in `STEPS` steps, and sleep afterwards."""
    directory = tmp_path_factory.mktemp("agents")
    asleep = directory / "asleep"
    asleep.mkdir()
    (directory / "agent.py").write_text(PROGRAM)
    prompts = ["digits"] * (STEPS * GROUPS) + ["sleep"] * 100
    rows = (json.dumps({"prompt": prompt, "label": "7"}) + "\n" for prompt in prompts)
    (directory / "mine.jsonl").write_text("".join(rows))
    sizes = ScratchModel(hidden_size=32, layers=1, heads=2, kv_heads=1, intermediate_size=32, context=96)
    build_model_directory(directory / "model", sizes, seed=0)
    launcher = Command(
        directory, "local", "--run", "agents", "--prompts", "mine.jsonl", "--data.no-shuffle",
        "--agent", "python3 -S agent.py", "--actors.environment.program-owns-reward",
        "--actors.environment.isolation.writable", str(asleep), "--actors.interruption.finish-within-s", "3",
        "--actors.environment.variables.ASLEEP", str(asleep),
        "--model.path", "model", "--learner.steps", "1000", "--sampling.max-new-tokens", "8",
        "--admission.groups-per-step", str(GROUPS), "--admission.samples-per-prompt", str(SAMPLES),
        "--admission.max-staleness", "1", "--monitoring.port", "0",
    )  # fmt: skip
    run = directory / "runs/agents"
    try:
        wait_for_step(launcher, run, STEPS, timeout_s=240)
        wait_until(lambda: len(list(asleep.iterdir())) == 2 * GROUPS * SAMPLES, "its programs", launcher)
        answers = {part: answers_of(part, launcher, run / "logs") for part in MONITORED}
        began = time.monotonic()
        assert launcher.stop(60) == 0, launcher.said()
        stopping_s = time.monotonic() - began
    finally:
        launcher.kill()
    left = running(str(directory / "agent.py"))
    return Stopped(run, launcher.said(), stopping_s, len(list(asleep.iterdir())), left, answers)


def answers_of(part: str, launcher: Command, logs: Path) -> dict[str, tuple[int, str]]:
    """Return what a part answers to probes once it has counted what it did."""
    [url] = re.findall(r"health_server_ready.*(http://127.0.0.1:\d+)", (logs / f"{part}.log").read_text())

    def has_counted() -> bool:
        return METRICS[part] <= {name for name, _ in numbers(get(f"{url}/metrics")[1])}

    wait_until(has_counted, f"the metrics of {part}", launcher)
    return {path: get(f"{url}/{path}") for path in ("healthz", "readyz", "metrics")}


def test_ctrl_c_ends_a_run_of_many_programs_within_seconds(stopped: Stopped):
    assert stopped.stopping_s < 45, stopped.said  # not the whole time that a part may take
    assert "part_killed" not in stopped.said
    assert "Stopping: each process saves or hands back what it began." in stopped.said
    assert stopped.sleepers == 2 * GROUPS * SAMPLES
    assert not stopped.left
    assert [run.state for run in recorded_runs([stopped.directory])] == ["stopped"]


def test_program_is_trained_as_it_is_with_the_rewards_it_posts(stopped: Stopped):
    summary = json.loads((stopped.directory / "summary.json").read_text())
    assert (summary["steps"], summary["accounted"]) == (STEPS, True), stopped.said
    assert summary["groups"]["trained"] == STEPS * GROUPS
    assert summary["trajectories_trained"] == STEPS * GROUPS * SAMPLES  # both turns are in one of them
    assert summary["messages_set_aside_reasons"] == {}
    actors_log = next((stopped.directory / "logs").glob("actors*")).read_text()
    assert "sampling_is_the_runs" in actors_log  # the program asked for another temperature


def test_every_process_of_a_run_answers_probes_and_shows_its_numbers(stopped: Stopped):
    for part, answers in stopped.answers.items():
        assert answers["healthz"] == (200, "healthy\n")
        ready, words = answers["readyz"]
        assert (ready, words[:7]) == (200, "ready: "), (part, words)
        _, text = answers["metrics"]
        found = numbers(text)
        assert found["sluice_ready", ""] == 1
        assert f'role="{part}"' in text
        assert METRICS[part] <= {name for name, _ in found}
