"""Fifteen environments of PyPI, a taskset and a server, installed and played as `--environment` does.

`SLUICE_TEST_ENVIRONMENTS` names a directory that keeps what is installed from one run to the next."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from actors.episodes.episode import Episode
from bus.errors import ConfigError
from launch.external_environments.environment import EnvironmentFile, ExternalEnvironment
from launch.settings.run_config import resolve
from tests.actors.gateway.served import END, TOKENIZER
from tests.launch.external_environments.played import playing, read_rows
from tests.launch.model_directory import directory

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(1800)]
HERE = Path(__file__).parent
CONSTRAINTS = "staros-stardata[env]:stardata.envs.constraint_gym"
MINIGRID = ("minigrid>=3.2,<4",)
MOVES = ("A C", "A B", "C B", "A C", "B A", "B C", "A C")
"""The seven moves of three discs of Hanoi."""
PATH = ("2", "2", "1", "1", "1", "2")
"""The way over the standard lake that is not frozen nowhere."""


@pytest.fixture(scope="module", autouse=True)
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        named = os.environ.get("SLUICE_TEST_ENVIRONMENTS")
        patch.setenv("XDG_CACHE_HOME", named or str(tmp_path_factory.mktemp("cache")))
        yield


def turns(prompt: str) -> int:
    """The number of answers that stand in a prompt."""
    return prompt.count("<|im_start|>assistant ") - 1


def guessing(prompt: str) -> str:
    """Halve what is left between 1 and 20, as the game tells."""
    low, high = 1, 20
    for guess, told in re.findall(
        r"assistant \[(\d+)\].*?target number is (higher|lower)", prompt, re.DOTALL
    ):
        low, high = (int(guess) + 1, high) if told == "higher" else (low, int(guess) - 1)
    return f"[{(low + high) // 2}]"


def source(name: str, answering: Callable[[str], str], reward: float | None = None, **more: object) -> object:
    """An environment, how it is answered, and the reward that this has, if it is known."""
    file = EnvironmentFile(source=name, prompts=3, heldout=1, **more)
    return pytest.param(file, answering, reward, id=re.sub(r"[^\w-]+", "-", name))


PUBLISHED = [
    source("textarena:GuessTheNumber-v0", guessing, 1.0),
    source("textarena:TowerOfHanoi-v0", lambda prompt: f"[{MOVES[turns(prompt) % 7]}]", 1.0),
    source("textarena:Mastermind-v0", lambda _: "[1 2 3 4]", settings={"max_turns": 5}),
    source("textarena:Minesweeper-v0-small", lambda seen: f"[{turns(seen)} 0]", settings={"max_turns": 5}),
    source("textarena:LightsOut-v0", lambda _: "[0 0]", settings={"max_turns": 3}),
    source("textarena:FifteenPuzzle-v0", lambda _: "[up]", settings={"max_turns": 3}),
    source("textarena:KuhnPoker-v0", lambda _: "[check]"),
    source("textarena:PigDice-v0", lambda _: "[hold]", settings={"players": 2, "max_turns": 8}),
    source(
        "gymnasium:FrozenLake-v1", lambda prompt: PATH[turns(prompt)], 1.0, settings={"is_slippery": False}
    ),
    source("gymnasium:Blackjack-v1", lambda _: "0"),
    source("gymnasium:CliffWalking-v1", lambda _: "1", -100.0, settings={"max_turns": 1}),
    source("gymnasium:Taxi-v4", lambda _: "4", settings={"max_turns": 3}),
    source(
        "gymnasium:minigrid:MiniGrid-Empty-5x5-v0", lambda prompt: ["2", "2", "1", "2", "2"][turns(prompt)],
        packages=MINIGRID, settings={"max_turns": 5},
    ),
    source(
        "gymnasium:minigrid:BabyAI-GoToRedBall-v0", lambda _: "2",
        packages=MINIGRID, settings={"max_turns": 4},
    ),
    source(f"verifiers:{CONSTRAINTS}", lambda _: "old pond, a frog", packages=("verifiers==0.1.14",)),
]  # fmt: skip


async def played(file: EnvironmentFile, answering: Callable[[str], str]) -> list[Episode]:
    """Install an environment, and play each of its prompts once."""
    environment = ExternalEnvironment(file)
    await asyncio.to_thread(environment.prepare)
    config = resolve(environment.settings)
    rows = [row for path in (config.data.prompts, config.data.heldout) for row in read_rows(path)]
    assert len(rows) >= 2, rows
    answers: set[str] = set()

    def noted(prompt: str) -> str:
        answers.add(answering(prompt))
        return answering(prompt)

    async with playing(config.actors.environment, noted) as play:
        episodes = await play([row["metadata"]["entry"] for row in rows])
    for part in (part for episode in episodes for part in episode.trajectories):
        sampled = [
            part.token_ids[turn.start : turn.stop][part.loss_mask[turn.start : turn.stop]]
            for turn in part.turns
        ]
        assert {TOKENIZER.decode(tokens.tolist()) for tokens in sampled} <= {f"{one}{END}" for one in answers}
        assert np.isfinite(part.reward)
        assert part.end == "completed"
    return episodes


@pytest.mark.parametrize(("file", "answering", "reward"), PUBLISHED)
async def test_published_environment_is_installed_and_played_and_pays_by_its_own_code(
    file: EnvironmentFile, answering: Callable[[str], str], reward: float | None
):
    episodes = await played(file, answering)
    found = [part.reward for episode in episodes for part in episode.trajectories]
    if reward is not None:
        assert found == [reward] * len(episodes)


def test_game_that_cannot_begin_is_refused_before_anything_is_played():
    for name, settings, wrong in (
        ("KuhnPoker-v0", {"players": 3}, "cannot begin with 3 to 3 players"),
        ("NoSuchGame-v0", {}, "NoSuchGame-v0-raw"),
    ):
        environment = ExternalEnvironment(EnvironmentFile(source=f"textarena:{name}", settings=settings))
        with pytest.raises(ConfigError, match=wrong):
            environment.prepare()


async def test_taskset_of_todays_verifiers_is_answered_in_the_adapters_process_and_pays_in_parts():
    package = str(HERE / "sums_taskset")
    file = EnvironmentFile(
        source=f"verifiers:{package}:sums_taskset", packages=("verifiers>=0.4,<0.5",), prompts=8
    )

    def answering(prompt: str) -> str:
        [(a, b)] = re.findall(r"(\d+)\+(\d+)\?", prompt)
        return str(int(a) + int(b)) if int(a) % 2 else "no"

    episodes = await played(file, answering)
    rewards = [part.reward for episode in episodes for part in episode.trajectories]
    assert sorted(set(rewards)) == [0.25, 1.25]
    assert episodes[0].trajectories[0].reward_components.keys() == {"exact", "short", "characters"}
    tooled = file.model_copy(update={"source": file.source.replace(":sums_", ":tooled_")})
    with pytest.raises(ConfigError, match="has tool servers, which verifiers installs as it plays"):
        ExternalEnvironment(tooled).prepare()


@contextmanager
def served(python: Path, program: str, *words: str) -> Iterator[str]:
    """Run a server, and yield its URL."""
    with subprocess.Popen(
        [python, HERE / program, *words], stdout=subprocess.PIPE, text=True, stdin=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


async def test_openenv_server_is_played_by_texts_until_it_is_done():
    nothing = ExternalEnvironment(EnvironmentFile(source="openenv:none"))
    with pytest.raises(Exception, match="unknown url type"):
        await asyncio.to_thread(nothing.prepare)  # installs its packages, with which the server runs, too
    with served(nothing.place / "venv/bin/python", "openenv_server.py") as url:
        file = EnvironmentFile(source=f"openenv:{url}", prompts=4, heldout=2)
        episodes = await played(file, lambda prompt: str(turns(prompt) + 1))
    # The answer is the seed's remainder by three, and one: so many guesses; each wrong one costs a tenth.
    assert [episode.trajectories[0].reward for episode in episodes[:4]] == pytest.approx([1.0, 0.9, 0.8, 1.0])

    def calling(prompt: str) -> str:
        if turns(prompt) == 0:
            return '<tool_call>{"name": "reset", "arguments": {"seed": 0}}</tool_call>'  # which is no tool
        return f'<tool_call>{{"name": "guess", "arguments": {{"number": {turns(prompt)}}}}}</tool_call>'

    with served(nothing.place / "venv/bin/python", "openenv_server.py", "tools") as url:
        file = EnvironmentFile(source=f"openenv:{url}", prompts=4, heldout=2)
        episodes = await played(file, calling)
    assert [episode.trajectories[-1].reward for episode in episodes[:4]] == pytest.approx(
        [1.0, 0.9, 0.8, 1.0]
    )
    assert "there is no tool 'reset'" in TOKENIZER.decode(episodes[0].trajectories[-1].token_ids.tolist())


def python_312() -> str:
    """A Python 3.12, which NeMo Gym wants."""
    named = ("python3.12", *map(str, Path.home().glob(".pyenv/versions/3.12*/bin/python")))
    for found in filter(None, map(shutil.which, named)):
        if subprocess.run([found, "-c", ""], check=False, capture_output=True, timeout=60).returncode == 0:
            return found
    pytest.skip("NeMo Gym wants Python 3.12, which is not here")


async def test_resources_server_of_nemo_gym_keeps_an_episodes_state_and_verifies_it():
    packages, python = ("nemo-gym>=0.4,<0.5",), python_312()
    nothing = EnvironmentFile(source="nemo_gym:http://127.0.0.1:1", packages=packages, python=python)
    place = ExternalEnvironment(nothing).place
    with pytest.raises(ConfigError, match="the setting data names"):
        await asyncio.to_thread(ExternalEnvironment(nothing).prepare)  # it installs what the server needs
    [data] = place.glob(
        "venv/lib/*/site-packages/resources_servers/example_session_state_mgmt/data/example.jsonl"
    )

    def answering(prompt: str) -> str:
        """Add both numbers, but leave out the second one where the first is even."""
        [numbers] = re.findall(r"add (\d+) then add (\d+)", prompt)
        if turns(prompt) < 1 + int(numbers[0]) % 2:
            arguments = f'{{"count": {numbers[turns(prompt)]}}}'
            return f'<tool_call>{{"name": "increment_counter", "arguments": {arguments}}}</tool_call>'
        return "done"

    with served(place / "venv/bin/python", "nemo_gym_server.py") as url:
        more = {"source": f"nemo_gym:{url}", "settings": {"data": str(data)}}
        episodes = await played(nothing.model_copy(update=more), answering)
    shown = [TOKENIZER.decode(episode.trajectories[-1].token_ids.tolist()) for episode in episodes]
    odd = [float(int(re.findall(r"add (\d+) then", text)[0]) % 2) for text in shown]
    assert [episode.trajectories[-1].reward for episode in episodes] == odd
    assert set(odd) == {0.0, 1.0}


def test_an_environment_of_others_has_a_python_of_its_own():
    file = PUBLISHED[0].values[0]
    environment = ExternalEnvironment(file)
    environment.prepare()
    python = environment.place / "venv/bin/python"
    found = subprocess.run(
        [python, "-c", "import json, sys; print(json.dumps([sys.prefix, sys.path]))"],
        check=True, capture_output=True, text=True, timeout=60, cwd="/",
    )  # fmt: skip
    prefix, path = json.loads(found.stdout)
    assert prefix == str(environment.place / "venv") != sys.prefix
    assert not {sys.prefix} & {str(Path(part).parent) for part in path}


def test_run_trains_on_a_game_that_it_installs_and_its_checkpoint_is_measured(tmp_path: Path):
    model = directory(tmp_path / "model", context=2048)

    def launched(*words: str) -> str:
        command = [sys.executable, "-m", "launch", *words, "--environment", "textarena:KuhnPoker-v0"]
        done = subprocess.run(
            [*command, "--sampling.max-new-tokens", "6", "--directory", str(tmp_path / "runs")],
            check=False, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    small = [
        "--admission.groups-per-step",
        "2",
        "--admission.samples-per-prompt",
        "2",
        "--learner.steps",
        "2",
    ]
    shown = launched("local", "--run", "poker", "--model.path", str(model), *small)
    assert re.search(r"All accounted for +│ yes", shown)
    assert re.search(r"Optimizer steps +│ 2 of reinforcement learning", shown)
    result = tmp_path / "results"
    launched("eval", "--out", str(result), "--checkpoint", str(tmp_path / "runs/poker"), "--count", "3")
    [found] = json.loads((result / "results.json").read_text())
    assert (found["prompts"], found["missing"]) == (3, 0)
