"""Environments of others: what `--environment` stands for, and how their adapters play."""

import asyncio
import json
import shlex
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from actors.episodes.errors import EpisodeError
from actors.settings.agents import AgentConfig
from bus.errors import ConfigError
from launch.cli.main import app
from launch.external_environments.environment import (
    KINDS,
    EnvironmentFile,
    ExternalEnvironment,
    external_environment,
)
from launch.settings.run_config import resolve
from tests.launch.external_environments.played import command_of, playing, read_rows


def config_of(command: list[str], **settings: object) -> AgentConfig:
    owned = {"long_lived": True, "reward": "posted", "program_owns_reward": True}
    return AgentConfig(command=shlex.join([*command, "play", "4"]), **owned, **settings)


async def test_gymnasium_is_played_to_its_end_by_words_and_numbers_and_a_wrong_action_costs():
    # On the map of four fields, right and down lead to the goal; the left is a wall.
    settings = {"desc": ["SF", "FG"], "is_slippery": False, "actions": ["left", "down", "right", "up"]}
    command = command_of("gymnasium", "FrozenLake-v1", {**settings, "max_turns": 3})

    def answering(prompt: str) -> str:
        turns = prompt.count("assistant ")
        if "0 (left), 1 (down), 2 (right), 3 (up)" not in prompt or turns > 3:
            return "lost"
        return ["right", "so I take 1", "nothing"][turns - 1]

    async with playing(config_of(command), answering) as play:
        [episode] = await play([{"seed": 7}])
        [part] = episode.trajectories
        assert (part.reward, part.end) == (1.0, "completed")
        assert part.reward_components == {"steps": 1.0, "invalid": 0.0}
    command = command_of("gymnasium", "FrozenLake-v1", settings)
    async with playing(config_of(command), lambda _: "4") as play:
        [wrong] = await play([{"seed": 7}])
        assert wrong.trajectories[0].reward_components == {"steps": 0.0, "invalid": -1.0}
        with pytest.raises(EpisodeError, match="KeyError: 'seed'"):
            await play([{"no": "seed"}])
        assert (await play([{"seed": 8}]))[0].trajectories[0].reward == -1.0  # the process has outlived that


@pytest.mark.parametrize(("reward", "said"), [("float('nan')", "is no reward"), ("{1}", "not JSON")])
async def test_a_reward_that_is_none_fails_its_episode_at_once_and_not_the_process(
    tmp_path: Path, reward: str, said: str
):
    adapter = tmp_path / "odd.py"
    adapter.write_text(
        "class Odd:\n    def play(self, entry, policy):\n"
        f"        policy.chat([{{'role': 'user', 'content': 'hi'}}])\n"
        f"        return {{'reward': {reward} if entry else 1.0}}\n"
        "def open_source(name, settings): return Odd()\n"
    )
    command = [*command_of("gymnasium", "x", {})[:2], str(adapter), "x", "{}"]
    async with asyncio.timeout(60), playing(config_of(command), lambda _: "fine") as play:
        with pytest.raises(EpisodeError, match=said):
            await play([1])
        assert (await play([0]))[0].trajectories[0].reward == 1.0


LOOK = """
import os
for path in ("/proc/self/fd/0", *(f"/proc/{os.getppid()}/{name}" for name in ("fd/0", "environ", "mem"))):
    try:
        with open(path, "rb") as file:
            print(file.read() if "mem" not in path else "memory")
    except OSError:
        pass
"""
SPIED = f"""
import subprocess, sys
class Spied:
    def play(self, entry, policy):
        policy.chat([{{"role": "user", "content": "hi"}}])
        seen = subprocess.check_output([sys.executable, "-c", {LOOK!r}])
        return {{"reward": float(len(seen.replace(b"b''", b"").strip()))}}
def open_source(name, settings): return Spied()
"""


async def test_a_process_of_an_environment_reads_no_addresses_of_tasks_and_rewards(tmp_path: Path):
    (tmp_path / "spied.py").write_text(SPIED)
    command = [*command_of("gymnasium", "x", {})[:2], str(tmp_path / "spied.py"), "x", "{}"]
    async with asyncio.timeout(60), playing(config_of(command), lambda _: "fine") as play:
        assert (await play([0]))[0].trajectories[0].reward == 0.0


TASK = {
    "responses_create_params": {
        "input": [{"role": "user", "content": "40+2?"}],
        "tools": [{"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}],
    },
    "wanted": "42",
}


@pytest.fixture
async def resources() -> AsyncIterator[tuple[str, list[str]]]:
    """A resources server by the protocol of NeMo Gym: it knows an episode by its cookie."""
    asked: list[str] = []

    async def seed(request: web.Request) -> web.Response:
        response = web.json_response({})
        response.set_cookie("session", (await request.json())["wanted"])
        return response

    async def add(request: web.Request) -> web.Response:
        asked.append(request.cookies["session"])
        given = await request.json()
        return web.json_response({"sum": given["a"] + given["b"]})

    async def verify(request: web.Request) -> web.Response:
        body = await request.json()
        said = [item for item in body["response"]["output"] if item["type"] == "message"]
        right = request.cookies["session"] == body["wanted"] == said[-1]["content"][0]["text"]
        calls = sum(item["type"] == "function_call_output" for item in body["response"]["output"])
        asked.append(f"verified {calls}")
        return web.json_response({**body, "reward": float(right), "calls": calls})

    server = web.Application()
    server.router.add_post("/seed_session", seed)
    server.router.add_post("/add", add)
    server.router.add_post("/verify", verify)
    runner = web.AppRunner(server)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}", asked
    await runner.cleanup()


async def test_nemo_gym_seeds_carries_out_its_tools_and_verifies_and_no_call_reaches_what_is_no_tool(
    resources: tuple[str, list[str]],
):
    url, asked = resources

    def answering(prompt: str) -> str:
        if '{"sum": 42}' in prompt:
            return "42"
        name = "add" if "there is no tool 'verify'" in prompt else "verify"
        return f'<tool_call>{{"name": "{name}", "arguments": {{"a": 40, "b": 2}}}}</tool_call>'

    config = config_of(command_of("nemo_gym", url, {}), isolation={"network": "host"})
    async with playing(config, answering) as play:
        [episode] = await play([TASK])
    assert asked == ["42", "verified 2"]  # not once before the end
    assert [part.reward for part in episode.trajectories] == [1.0]
    assert episode.trajectories[0].reward_components == {"calls": 2.0}


def test_names_and_files_say_what_is_wrong_with_them(tmp_path: Path):
    path = tmp_path / "mine.toml"
    for given, wrong in (
        ("textarana:Nim-v0", "no kind 'textarana': did you mean 'textarena'"),
        ("gymnasium", "write gymnasium:NAME, where NAME is the id of an environment"),
        ("textarena:", "write textarena:NAME"),
        (str(tmp_path / "none.toml"), "No such file"),
    ):
        with pytest.raises(ConfigError, match=wrong):
            external_environment(given)
    path.write_text('source = "textarena:Nim-v0"\nsetings = {}\n')
    with pytest.raises(ConfigError, match="setings: Extra inputs are not permitted"):
        external_environment(str(path))


def test_environment_is_settings_of_a_run_and_reasoning_gym_stays_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "mine.toml"
    path.write_text('source = "textarena:Nim-v0"\nepisodes_at_once = 7\nsettings = { players = 2 }\n')
    app(["local", "--environment", str(path), "--print-config", "--json"], result_action="return_value")
    shown = json.loads(capsys.readouterr().out)["settings"]
    environment = shown["actors"]["environment"]
    words = shlex.split(environment["command"])
    assert words[-4:] == ["Nim-v0", '{"players": 2}', "play", "7"]
    assert environment["long_lived"]
    assert shown["data"]["heldout"].endswith("heldout.jsonl")
    assert not (tmp_path / "cache").exists()  # nothing is installed to print settings
    found = resolve(external_environment("reasoning_gym:chain_sum").settings)
    assert (found.data.task, found.actors.environment.reward) == ("reasoning_gym/chain_sum", "reasoning_gym")
    both = [external_environment(f"textarena:{name}-v0").place for name in ("Nim", "Wordle")]
    assert both[0] == both[1]  # one installation serves all games
    of_another = EnvironmentFile(source="textarena:Nim-v0", python=str(tmp_path / "no-python"))
    assert ExternalEnvironment(of_another).place != both[0]
    with pytest.raises(ConfigError, match=r"there is no program '.*no-python'"):
        ExternalEnvironment(of_another).prepare()


def test_names_of_the_hub_are_installed_from_their_owners_index_and_paths_as_they_are():
    hub = "--extra-index-url=https://hub.primeintellect.ai/will/simple/"
    for name, packages in (
        ("will/word-le@0.1.2", ("word-le==0.1.2", hub)),
        ("will/wordle:wordle.inner", ("wordle", hub)),
        ("/home/me/wordle:wordle", ("/home/me/wordle",)),
        ("./will/wordle", ("./will/wordle",)),
        ("wordle[extra]>=2:wordle.inner", ("wordle[extra]>=2",)),
    ):
        assert KINDS["verifiers"].packages(name) == packages


@pytest.mark.slow
def test_packages_are_installed_once_and_what_fails_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data = tmp_path / "tasks.jsonl"
    data.write_text("".join(json.dumps({**TASK, "wanted": str(n)}) + "\n" for n in range(20)))
    file = EnvironmentFile(
        source="nemo_gym:http://127.0.0.1:1", settings={"data": str(data)}, prompts=15, heldout=9
    )
    environment = ExternalEnvironment(file)
    environment.prepare()
    files = environment.settings["data"]
    rows = {name: read_rows(path) for name, path in files.items()}
    assert [row["metadata"]["entry"]["wanted"] for row in rows["heldout"]] == ["0", "1"]
    assert [row["metadata"]["entry"]["wanted"] for row in rows["prompts"]] == [str(n) for n in range(2, 17)]
    before = {path: path.stat().st_mtime_ns for path in [*files.values(), environment.place / "installed"]}
    environment.prepare()
    assert {path: path.stat().st_mtime_ns for path in before} == before
    missing = ExternalEnvironment(file.model_copy(update={"settings": {"data": "nowhere"}}))
    with pytest.raises(ConfigError, match="the setting data names 'nowhere', which is no file"):
        missing.prepare()
    broken = ExternalEnvironment(file.model_copy(update={"packages": (str(tmp_path / "no-package"),)}))
    with pytest.raises(ConfigError, match="no-package"):
        broken.prepare()
    assert not (broken.place / "installed").exists()
