"""A program that takes many tasks: what it plays is recorded, and its end costs what it had under way."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from actors.engines.base import Sampling
from actors.environments import clients, long_lived_agent
from actors.environments.build import build_environment
from actors.environments.long_lived_agent import LongLivedAgent
from actors.episodes.episode import Episode
from actors.episodes.errors import REWARD_FAULT, EpisodeError
from actors.episodes.task import Task
from actors.gateway.task_offers import Taker, TaskOffers
from actors.policy.policy import Policy
from actors.rollouts.worker import end_after
from actors.settings.agents import AgentConfig
from benchmarks.scripted_engine import ScriptedEngine
from bus.errors import ConfigError, HandBackError
from tests.actors.gateway.served import TOKENIZER, script, until

HEAD = """
import json, os, sys, time, urllib.request
def post(url, body, key=""):
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=20))
tasks_url = json.load(sys.stdin)["tasks_url"]
def take(**more):
    return post(tasks_url, {"wait_s": 20, **more})
def ask(task):
    body = {"model": "any", "messages": [{"role": "user", "content": task["prompt"]}]}
    answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, task["session"])
    return answer["choices"][0]["message"]["content"]
"""
PLAY = """
while True:
    task = take()
    reward = float(ask(task) == task["label"])
    post(task["reward_url"], {"reward": reward, "components": {"pid": os.getpid()}})
"""


def task(number: int = 0, **more: object) -> Task:
    return Task(task_id=f"g00000000.{number}", prompt="say fine", label="fine", **more)


class Agent:
    """An environment around a program, with an engine that answers "fine"."""

    def __init__(self, environment: LongLivedAgent) -> None:
        self.environment = environment
        self.policy = Policy(ScriptedEngine(script(lambda _: "fine")), TOKENIZER, Sampling(max_new_tokens=64))

    async def run(self, number: int = 0, **more: object) -> Episode:
        return await self.environment.run(task(number, **more), self.policy)

    def rollout(self, number: int = 0) -> "asyncio.Task[Episode]":
        return asyncio.create_task(self.run(number))


@pytest.fixture(autouse=True)
def in_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_lived_agent, "RESTART_S", 0.01)
    monkeypatch.setattr(long_lived_agent, "LOOK_S", 0.02)
    monkeypatch.setattr(clients, "LOOK_S", 0.02)


@asynccontextmanager
async def running(
    directory: Path, program: str, finish_within_s: float = 30.0, **settings: object
) -> AsyncIterator[Agent]:
    path = directory / "agent.py"
    path.write_text(HEAD + program)
    command = f"{{python}} -S {path}"
    owned = {"reward": "posted", "program_owns_reward": True} if "reward" not in settings else {}
    isolation = {"writable": (directory,)}
    config = AgentConfig(
        **{"command": command, "long_lived": True, "isolation": isolation, **owned, **settings}
    )
    environment = build_environment(config, finish_within_s=finish_within_s)
    assert isinstance(environment, LongLivedAgent)
    try:
        yield Agent(environment)
    finally:
        await environment.close()


async def test_held_out_tasks_and_those_of_training_wait_for_one_another_no_longer_than_their_share():
    offers = TaskOffers()
    with ExitStack() as stack:
        for number in range(20):
            stack.enter_context(offers.offering(task(number, heldout=number < 10)))
        taken = [await offers.claim(None, Taker(), 1.0) for _ in range(20)]
    order = "".join("h" if offer is not None and offer.task.heldout else "t" for offer in taken)
    assert order == "tttthtttthtt" + "h" * 8  # all ten are taken once nothing else waits


@pytest.mark.parametrize(("stated", "outcome"), [(-0.5, -0.5), (None, "environment_error")])
async def test_a_client_that_fails_has_the_reward_that_the_settings_state(tmp_path: Path, stated, outcome):
    program = "taken = take()\nask(taken)\npost(taken['end_url'], {'failed': 'the tests crashed'})\ntake()"
    async with running(tmp_path, program, failed_reward=stated) as agent:
        if stated is None:
            with pytest.raises(EpisodeError, match="the tests crashed") as failed:
                await agent.run()
            assert end_after(failed.value) == outcome
        else:
            [part] = (await agent.run()).trajectories
            assert (part.reward, part.is_trained, part.reward_source) == (outcome, True, "settings")
            assert "the tests crashed" in str(part.metadata[REWARD_FAULT])


async def test_one_program_plays_many_tasks_also_held_out_ones(tmp_path: Path):
    async with running(tmp_path, PLAY) as agent:
        episodes = await asyncio.gather(agent.run(0), agent.run(1), agent.run(2, heldout=True))
    parts = [part for episode in episodes for part in episode.trajectories]
    assert [(part.reward, part.end, part.loss_mask.sum()) for part in parts] == [(1.0, "completed", 5)] * 3
    assert len({part.reward_components["pid"] for part in parts}) == 1


async def test_reward_function_judges_what_a_program_ends(tmp_path: Path):
    program = 'while True:\n    task = take()\n    assert "label" not in task\n    ask(task)\n'
    async with running(tmp_path, program + "    post(task['end_url'], {})\n", reward="exact") as agent:
        episode = await agent.run()
    assert [part.reward for part in episode.trajectories] == [1.0]


async def test_program_that_dies_fails_its_own_tasks_and_the_next_one_plays_the_others(tmp_path: Path):
    died = tmp_path / "died"
    program = f"""
if not os.path.exists({str(died)!r}):
    take()
    open({str(died)!r}, "w").close()
    sys.exit("out of memory")
"""
    async with running(tmp_path, program + PLAY) as agent:
        first, second = agent.rollout(0), agent.rollout(1)
        with pytest.raises(EpisodeError, match=r"its program has ended: status 1: out of memory") as failure:
            await first
        assert end_after(failure.value) == "environment_error"
        assert (await second).trajectories[0].reward == 1.0


async def test_program_that_takes_no_task_fails_those_that_wait(tmp_path: Path):
    async with running(tmp_path, "raise ImportError('no such package')") as agent:
        with pytest.raises(EpisodeError, match=r"takes no task: status 1: (.|\n)*no such package"):
            await agent.run()


async def test_program_that_hangs_is_ended(tmp_path: Path):
    async with running(tmp_path, "time.sleep(60)", program_timeout_s=0.2) as agent:
        with pytest.raises(EpisodeError, match=r"it took no task for .* s, and was ended"):
            await agent.run()


async def test_program_whose_requests_are_all_refused_is_ended_like_one_that_hangs(tmp_path: Path):
    program = """
import itertools
for n in itertools.count():
    try:
        take(wait_s="long")
    except urllib.error.HTTPError:
        time.sleep(0.01)
"""
    async with running(tmp_path, program, program_timeout_s=0.5) as agent:
        with pytest.raises(EpisodeError, match=r"it took no task for .* s, and was ended"):
            async with asyncio.timeout(30):
                await agent.run()


async def test_program_that_cannot_start_leaves_the_tasks_to_a_healthy_one(tmp_path: Path):
    first, failed = tmp_path / "first", tmp_path / "failed"
    failed.mkdir()
    program = f"""
try:
    os.close(os.open({str(first)!r}, os.O_CREAT | os.O_EXCL))
except FileExistsError:
    open({str(failed)!r} + f"/{{time.time_ns()}}", "w").close()
    sys.exit("its port is in use")
while len(os.listdir({str(failed)!r})) < 3:
    time.sleep(0.01)
"""
    async with running(tmp_path, program + PLAY, programs_at_once=2) as agent:
        episodes = await asyncio.gather(agent.run(0), agent.run(1))
    assert [part.reward for episode in episodes for part in episode.trajectories] == [1.0, 1.0]


async def test_programs_may_use_the_same_idempotency_key(tmp_path: Path):
    seen = tmp_path / "seen"
    seen.mkdir()
    program = f"""
first = urllib.request.Request(
    tasks_url, b'{{"wait_s": 20}}',
    {{"Content-Type": "application/json", "Idempotency-Key": "1"}},
)
task = json.load(urllib.request.urlopen(first, timeout=20))
open({str(seen)!r} + "/" + task["task_id"], "w").close()
while len(os.listdir({str(seen)!r})) < 2:
    time.sleep(0.01)
reward = float(ask(task) == task["label"])
post(task["reward_url"], {{"reward": reward}})
"""
    async with running(tmp_path, program + PLAY, programs_at_once=2) as agent:
        async with asyncio.timeout(30):
            await asyncio.gather(agent.run(0), agent.run(1))
    assert len(list(seen.iterdir())) == 2


async def test_program_brings_no_tasks_of_its_own(tmp_path: Path):
    program = """
try:
    take(task={"prompt": "mine"})
except urllib.error.HTTPError as error:
    sys.exit(json.load(error)["error"]["message"])
"""
    async with running(tmp_path, program) as agent:
        with pytest.raises(EpisodeError, match="brings none of its own"):
            await agent.run()


async def test_several_programs_share_the_tasks(tmp_path: Path):
    seen = tmp_path / "seen"
    seen.mkdir()
    program = f"""
open({str(seen)!r} + f"/{{time.time_ns()}}", "w").close()
while len(os.listdir({str(seen)!r})) < 2:
    time.sleep(0.01)
"""
    async with running(tmp_path, program + PLAY, programs_at_once=2) as agent:
        await agent.run()
    assert len(list(seen.iterdir())) == 2


async def test_stop_gives_back_what_is_played_and_what_nobody_took(tmp_path: Path):
    taken = tmp_path / "taken"
    program = f"take()\nopen({str(taken)!r}, 'w').close()\ntime.sleep(60)"
    async with running(tmp_path, program, finish_within_s=0.1) as agent:
        agent.environment.stop_with(stop := asyncio.Event())
        rollouts = [agent.rollout(0), agent.rollout(1)]
        await until(taken.exists, "a task that is taken")
        stop.set()
        async with asyncio.timeout(30):
            outcomes = await asyncio.gather(*rollouts, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [HandBackError] * 2


async def test_program_that_asks_after_the_stop_is_told_so_after_a_moment(tmp_path: Path, monkeypatch):
    """A program that asks again at once would be in the way of those that play their last turns."""
    monkeypatch.setattr(clients, "LOOK_S", 0.2)
    asked = tmp_path / "asked"
    program = f"""
while True:
    began = time.monotonic()
    try:
        take()
    except urllib.error.HTTPError as error:
        open({str(asked)!r}, "a").write(f"{{error.code}} {{time.monotonic() - began}}\\n")
"""
    async with running(tmp_path, program, finish_within_s=0.1) as agent:
        agent.environment.stop_with(stop := asyncio.Event())
        rollout = agent.rollout()
        stop.set()
        with pytest.raises(HandBackError):
            await rollout
        await until(lambda: asked.exists() and asked.read_text().count("\n") >= 2, "two questions")
    answers = [line.split() for line in asked.read_text().splitlines()]
    assert {code for code, _ in answers} == {"503"}
    assert min(float(took_s) for _, took_s in answers) > 0.15


def test_missing_package_is_told_at_start_up_with_the_remedy():
    config = AgentConfig(command="{python} agent.py", packages=("json", "no_such_package"))
    with pytest.raises(ConfigError, match=f"needs no_such_package.*{sys.executable} -m pip install no_such"):
        build_environment(config)
    with pytest.raises(ValueError, match="packages"):
        AgentConfig(command="{python} agent.py", packages=("json.tool",))  # a look for it would import json


def test_python_of_sluice_is_a_word_of_the_command():
    assert AgentConfig(command="{python} -m agent").arguments == [sys.executable, "-m", "agent"]
    assert json.loads(AgentConfig(command="{python}").model_dump_json())["command"] == "{python}"
