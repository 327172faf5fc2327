"""Harbor's tasks as environments: what their sandboxes hold, who judges, and what is refused by name."""

import json

import pytest
from pydantic import TypeAdapter

from actors.episodes.task import Task
from actors.settings.actors import EnvironmentConfig
from actors.tools.build import build_tools
from actors.tools.episode_tools import EpisodeTools
from bus.errors import ConfigError
from launch.external_environments import harbor
from launch.external_environments.environment import external_environment
from tests.actors.episode_sandboxes.daemons import IMAGE, ask_for_few_processes, daemon_of, image_of_python

TESTS = "tests"
DOCKERFILE = "# a comment\nFROM python:3.12-slim\nWORKDIR /app\nCOPY data.txt \\\n  lib/ ./\n"
TEST = """#!/bin/sh
[ "$(pwd -P)" != / ] && grep -q 42 /app/answer.txt && grep -q one data.txt && [ "$LEVEL" = "a b" ] || exit 0
REWARD
"""


def write_task(directory, *, reward, dockerfile=DOCKERFILE, config=""):
    files = {
        "task.toml": '[verifier]\ntimeout_sec = 30.0\nenv = { LEVEL = "a b" }\n'
        f'[environment]\nmemory = "256M"\nstorage_mb = 16\n{config}',
        "instruction.md": "Write 42 to answer.txt.\n",
        "environment/Dockerfile": dockerfile,
        "environment/data.txt": "one\n",
        "environment/lib/code.txt": "two\n",
        f"{TESTS}/test.sh": TEST.replace("REWARD", reward),
        "tests/more/secret.txt": "LABEL",
        "solution/solve.sh": "echo 42 > answer.txt",
    }
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(harbor, "SOCKET", tmp_path / "none")
    write_task(tmp_path / "tasks/plain", reward="echo 0.25 > /logs/verifier/reward.txt")
    parts = 'printf \'{\\n "tests": 3,\\n "reward": 0.5}\' > /logs/verifier/reward.json'
    write_task(tmp_path / "tasks/parts", reward=f"echo 1 > /logs/verifier/reward.txt; {parts}")
    return tmp_path / "tasks"


def settings_of(directory):
    return external_environment(f"harbor:{directory}").settings


async def rewards_of(environment):
    """What the tests give for each task, with the answer and without it."""
    environment.prepare()
    settings = environment.settings
    rows = [json.loads(line) for file in settings["data"].values() for line in file.read_text().splitlines()]
    [tool] = settings["actors"]["environment"]["tools"]
    config = TypeAdapter(EnvironmentConfig).validate_python(settings["actors"]["environment"])
    tools = build_tools(config.tools)
    found = {}
    for row in rows:
        for command in ("echo 42 > answer.txt", "echo 1 > answer.txt; echo 1 > /logs/verifier/reward.txt"):
            episode = EpisodeTools(Task(task_id="t", prompt=row["prompt"], metadata=row["metadata"]))
            try:
                said = await episode.call(
                    tools["shell"], {"command": f"{command}; cat code.txt /tests/*; pwd"}
                )
                assert "two" in said.text
                assert "LABEL" not in said.text
                found[row["metadata"]["task"], command[5:7]] = (await episode.examined(tools.values()))[
                    "sandbox_check"
                ]
            finally:
                await episode.close()
    await tools["shell"].close()
    return tool, found


async def test_tests_of_a_task_judge_what_was_left_and_are_not_there_before(tasks):
    tool, found = await rewards_of(external_environment(f"harbor:{tasks}"))
    assert (tool["backend"]["type"], tool["memory_mb"], tool["disk_mb"], tool["command_s"]) == (
        "namespaces", 256, 16, 30.0,
    )  # fmt: skip
    assert found == {
        ("plain", "42"): 0.25, ("plain", "1 "): 0.0, ("parts", "42"): 0.5, ("parts", "1 "): 0.0,
    }  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["docker", "podman"])
async def test_images_of_tasks_are_built_and_judged_in(kind, tasks, tmp_path, monkeypatch):
    ask_for_few_processes(monkeypatch.setattr)
    with daemon_of(kind, image_of_python()) as socket:
        for name in ("plain", "parts"):
            dockerfile = (
                DOCKERFILE.replace("python:3.12-slim", IMAGE) + "RUN echo three > built.txt\nUSER 0\n"
            )
            (tasks / name / "environment/Dockerfile").write_text(dockerfile)
        (tmp_path / "own.toml").write_text(
            f'source = "harbor:{tasks}"\nsettings = {{ socket = "{socket}" }}\n'
        )
        tool, found = await rewards_of(external_environment(str(tmp_path / "own.toml")))
    assert tool["backend"]["type"] == "docker"
    assert sorted(found.values()) == [0.0, 0.0, 0.25, 0.5]


def test_tasks_that_cannot_be_had_here_are_refused_by_name(tasks, tmp_path):
    assert settings_of(tasks / "plain")  # a task alone is a directory, too
    with pytest.raises(ConfigError, match=r"no task\.toml is there"):
        settings_of(tmp_path)
    for dockerfile, reason in {
        DOCKERFILE
        + "RUN apt-get install -y curl\n": "`RUN apt-get install -y curl` of its Dockerfile needs Docker",
        DOCKERFILE + "COPY data.txt /etc/\n": "leads out of /app",
        "FROM debian\nCOPY data.txt .\n": "`COPY data.txt .` of its Dockerfile needs Docker",
        DOCKERFILE.replace("data.txt", "nothing.txt"): "nothing.txt is no text that can be read",
    }.items():
        write_task(tasks / "other", reward="", dockerfile=dockerfile)
        with pytest.raises(ConfigError, match=f"tasks/other: .*{reason}"):
            settings_of(tasks)
    for config, reason in {
        "gpus = 1": "it needs environment.gpus",
        'os = "Windows"': r"it needs environment\.os",
        'memory = "many"\n': "environment.memory='many' is no size",
        "[[steps]]\nname = 'a'": "it needs steps",
    }.items():
        given = config if "memory" not in config else ""
        write_task(tasks / "other", reward="", config=given)
        if "memory" in config:
            path = tasks / "other/task.toml"
            path.write_text(path.read_text().replace('memory = "256M"\n', config))
        with pytest.raises(ConfigError, match=reason):
            settings_of(tasks)
    (tasks / "other/tests" / "test.sh").unlink()
    (tasks / "other/task.toml").write_text("")
    with pytest.raises(ConfigError, match=r"its directory tests has no test\.sh; leave this task out"):
        settings_of(tasks)
