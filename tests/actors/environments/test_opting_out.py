"""A policy does not gain by keeping its episode from being scored; what the host breaks stays an error."""

import asyncio
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from actors.engines.base import Sampling
from actors.environments.agent import AgentEnvironment, ProgramFaultError
from actors.environments.base import Environment
from actors.environments.build import build_environment
from actors.episodes.episode import Episode
from actors.episodes.errors import REWARD_FAULT, EpisodeError
from actors.episodes.task import Task
from actors.policy.policy import Policy
from actors.programs import memory_groups
from actors.programs.runner import ProgramFailedError
from actors.programs.watch import below
from actors.rewards.base import RewardError
from actors.rollouts.worker import end_after
from actors.settings.actors import PluginEnvironmentConfig
from actors.settings.agents import AgentConfig
from actors.settings.games import GameConfig, PluginGame
from actors.settings.panel import DebateConfig, PanelConfig
from benchmarks.scripted_engine import ScriptedEngine
from bus.errors import HandBackError, RequestRefusedError
from tests.actors.environments.schemers import Schemer
from tests.actors.gateway.served import TOKENIZER, encoded
from tests.actors.programs.memory_kills import killed_elsewhere

TASK = Task(task_id="g00000000.0", prompt="earn", label="right")
VERIFIER = """
import json, os, sys, urllib.request
given = json.load(sys.stdin)
path = os.path.join(given["directory"], "answer.txt")
left = open(path).read() if os.path.exists(path) else ""
if left == "what no verifier reads":
    raise SystemExit("cannot be read")
reward = json.dumps(float(left.strip() == given["label"])).encode()
urllib.request.urlopen(urllib.request.Request(given["reward_url"], reward), timeout=20)
"""
NESTED = "import os\nfor _ in range(1100): os.mkdir('answer.txt'); os.chdir('answer.txt')"
AGENT = Path(__file__).with_name("shell_agent.py").read_text()
Run = Callable[..., asyncio.Future[Episode]]


@asynccontextmanager
async def agents(tmp_path: Path, verifier: str = VERIFIER, **settings: object) -> AsyncIterator[Run]:
    """Yield what runs an episode of a policy with a shell, which a verifier judges."""
    agent, judge = tmp_path / "agent.py", tmp_path / "verifier.py"
    agent.write_text(AGENT)
    judge.write_text(verifier)
    environment = AgentEnvironment.from_config(
        AgentConfig(
            command=f"{sys.executable} -S {agent}",
            **{"verifier": f"{sys.executable} -S {judge}", "reward": "posted", **settings},
        )
    )

    async def run(*commands: str, task: Task = TASK, policy: Policy | None = None) -> Episode:
        return await environment.run(task, policy or Schemer([*commands]).policy)

    try:
        yield run
    finally:
        await environment.close()


def there(paths: list[str]) -> list[str]:
    """Return those of the paths that exist."""
    return [path for path in paths if Path(path).exists()]


def processes_of(command: str) -> list[int]:
    """Return the processes below this one whose command contains a text."""
    found = []
    for one in below(os.getpid()):
        with suppress(OSError):
            if command in Path(f"/proc/{one.pid}/cmdline").read_bytes().decode().replace("\0", " "):
                found.append(one.pid)
    return found


def scored(episode: Episode) -> tuple[float, bool]:
    """Return the reward of an episode, and whether it has that because it could not be scored."""
    [reward] = {part.reward for part in episode.trajectories}
    [faulty] = {REWARD_FAULT in part.metadata for part in episode.trajectories}
    assert episode.metrics["rollout/reward_fault_fraction"] == faulty
    assert all(part.is_trained for part in episode.trajectories)
    return reward, faulty


@pytest.mark.slow
async def test_policy_with_a_shell_cannot_opt_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made, mkdtemp = [], tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **named: made.append(mkdtemp(**named)) or made[-1])
    ways = {
        "the agent is killed": "kill -9 $PPID",
        "all is killed": "kill -9 -1",
        "the agent writes too much": "yes > /proc/$PPID/fd/1",
        "a pipe": "mkfifo answer.txt",
        "no text": "printf '\\377\\376' > answer.txt",
        "a directory": "mkdir answer.txt",
        "a deep directory": f'{sys.executable} -S -c "{NESTED}"',
        "a file that nobody may read": "ln -s /dev/full answer.txt",
        "a file without end": "ln -s /dev/zero answer.txt",
        "a large file": "truncate -s 600M answer.txt",
        "no verifier's text": "printf 'what no verifier reads' > answer.txt",
    }
    plain = {
        "nothing": "true",
        "a wrong answer": "echo wrong > answer.txt",
        "a link to itself": "ln -s answer.txt answer.txt",
        "NUL": "head -c 100 /dev/zero > answer.txt",
        "a long name": "touch $(head -c 255 /dev/zero | tr '\\0' a)",
        "a name that is no text": "touch $(printf '\\377')",
        "no permissions": "mkdir shut; touch shut/in; chmod 0 shut",
    }
    limits = {"reward_timeout_s": 5.0, "most_output_bytes": 1 << 20, "programs_at_once": 4}
    async with agents(tmp_path, unfinished_reward=-1.0, isolation={"memory_mb": 500}, **limits) as run:
        assert scored(await run("echo right > answer.txt")) == (1.0, False)
        outcomes = await asyncio.gather(
            *(run(way) for way in [*ways.values(), *plain.values()]), return_exceptions=True
        )
        found = {
            way: scored(outcome) if isinstance(outcome, Episode) else outcome
            for way, outcome in zip([*ways, *plain], outcomes, strict=True)
        }
        assert found == {**dict.fromkeys(ways, (-1.0, True)), **dict.fromkeys(plain, (0.0, False))}
    assert len(made) > len(ways)
    assert not there(made)


@pytest.mark.slow
async def test_program_that_outlives_its_time_is_the_policys_fault(tmp_path: Path):
    async with agents(tmp_path, program_timeout_s=2.5) as run:
        await run("true")
        assert scored(await run("sleep 60.5")) == (0.0, True)


async def test_program_that_fails_is_the_policys_fault_once_one_has_ended_well(tmp_path: Path):
    async with agents(tmp_path, unfinished_reward=-1.0) as run:
        with pytest.raises(EpisodeError, match="status -9"):
            await run("kill -9 $PPID")  # by all that is known the program never works
        assert scored(await run("true")) == (0.0, False)
        episode = await run("kill -9 $PPID")
        assert scored(episode) == (-1.0, True)
        [part, *_] = episode.trajectories
        assert (part.reward_source, part.end) == ("settings", "completed")
        assert "status -9" in str(part.metadata[REWARD_FAULT])


async def test_kill_for_memory_elsewhere_excuses_no_program(tmp_path: Path):
    """A policy has such a kill at will, as where a container of its own has a limit of memory."""
    async with agents(tmp_path, unfinished_reward=-1.0) as run:
        await run("true")
        schemer = Schemer(["kill -9 $PPID"])
        answered = schemer.engine.generate

        async def provoking(request):
            await killed_elsewhere()
            return await answered(request)

        schemer.engine.generate = provoking
        assert scored(await run(policy=schemer.policy)) == (-1.0, True)


async def test_program_that_its_host_has_no_memory_for_is_nobodys_fault(tmp_path: Path, monkeypatch):
    async with agents(tmp_path) as run:
        await run("true")
        monkeypatch.setattr(memory_groups, "kills_in_group", lambda _: 1)
        with pytest.raises(EpisodeError, match=r"no memory left and killed a process.*status -9") as failed:
            await run("kill -9 $PPID")
        assert end_after(failed.value) == "environment_error"
        assert scored(await run("echo right > answer.txt")) == (1.0, False)  # it ended well all the same


async def test_failures_stay_out_where_the_settings_say_so(tmp_path: Path):
    async with agents(tmp_path, unfinished_reward="left_out") as run:
        await run("true")
        with pytest.raises(EpisodeError, match="status -9"):
            await run("kill -9 $PPID")
        with pytest.raises(RewardError, match="works on another answer"):
            await run("mkdir answer.txt")


async def test_verifier_that_fails_on_nothing_too_is_broken(tmp_path: Path):
    """Its judge goes away after it has judged nothing once."""
    judge = tmp_path / "judge"
    judge.touch()
    away = f"import os\nassert os.path.exists({str(judge)!r}), 'the judge is away'\n"
    async with agents(tmp_path, away + VERIFIER, isolation={"readable": (tmp_path,)}) as run:
        assert scored(await run("true")) == (0.0, False)
        judge.unlink()
        with pytest.raises(RewardError, match=r"(?s)the judge is away.*host is broken"):
            await run("echo right > answer.txt")


async def test_verifier_that_has_judged_nothing_but_nothing_blames_nobody(tmp_path: Path):
    lacking = VERIFIER.replace("reward = ", "if left: import lacking\nreward = ", 1)
    async with agents(tmp_path, lacking) as run:
        with pytest.raises(RewardError, match="works on another answer"):
            await run("echo right > answer.txt")
        assert scored(await run("true")) == (0.0, False)
        assert scored(await run("echo right > answer.txt")) == (0.0, True)


async def test_verifier_that_cannot_judge_nothing_is_refused_before_it_judges(tmp_path: Path):
    verifier = VERIFIER.replace(" if os.path.exists(path) else ''", "").replace(
        ' if os.path.exists(path) else ""', ""
    )
    async with agents(tmp_path, verifier) as run:
        with pytest.raises(RewardError, match="fails on an empty directory and answer"):
            await run("echo right > answer.txt")


def answered_once() -> Schemer:
    """Return a policy whose engine answers one request, and leaves those that follow waiting."""
    schemer = Schemer(["true"])
    answered = schemer.engine.generate

    async def slow(request):
        if schemer.seen:
            await asyncio.Event().wait()
        return await answered(request)

    schemer.engine.generate = slow
    return schemer


async def test_slow_engine_is_no_fault_of_the_policy(tmp_path: Path):
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    environment = AgentEnvironment.from_config(
        AgentConfig(command=f"{sys.executable} -S {agent}", reward="exact", program_timeout_s=8.0)
    )
    try:
        await environment.run(TASK, Schemer([]).policy)
        schemer = answered_once()
        with pytest.raises(EpisodeError, match=r"it ran for 8 s") as failed:
            await environment.run(TASK, schemer.policy)
        assert end_after(failed.value) == "timeout"
    finally:
        await environment.close()


@pytest.mark.parametrize(("asked_for_s", "blamed"), [(1.5, EpisodeError), (3.0, ProgramFaultError)])
def test_time_before_the_first_request_is_not_the_policys(asked_for_s: float, blamed: type[EpisodeError]):
    environment = AgentEnvironment.from_config(
        AgentConfig(command=sys.executable, reward="exact", program_timeout_s=600.0)
    )
    first_request_s = time.monotonic() - asked_for_s
    session = SimpleNamespace(longest_wait_s=1.0, first_request_s=first_request_s, last=object())
    error = ProgramFailedError("it ran for 600 s")
    error.__cause__ = TimeoutError()
    assert type(environment._blamed(TASK, session, error)) is blamed


async def test_client_that_gives_up_on_a_slow_engine_is_no_fault_of_the_policy(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("actors.environments.agent.LONG_WAIT_S", 0.3)
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT.replace("timeout=60", "timeout=2", 1))
    command = f"{sys.executable} -S {agent}"
    environment = AgentEnvironment.from_config(AgentConfig(command=command, reward="exact"))
    try:
        await environment.run(TASK, Schemer([]).policy)
        assert scored(await environment.run(TASK, Schemer(["kill -9 $PPID"]).policy)) == (0.0, True)
        schemer = answered_once()
        with pytest.raises(EpisodeError, match="status 1"):
            await environment.run(TASK, schemer.policy)
    finally:
        await environment.close()


@pytest.mark.parametrize("killed", ["the program", "who watches over it"])
async def test_program_that_ends_with_its_actor_is_no_fault_of_the_policy(tmp_path: Path, killed: str):
    """Managers of services and clusters signal every process of an actor at once."""
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    command = f"{sys.executable} -S {agent}"
    environment = AgentEnvironment.from_config(AgentConfig(command=command, reward="exact"))
    stop = asyncio.Event()
    environment.stop_with(stop)
    try:
        await environment.run(TASK, Schemer([]).policy)
        running = asyncio.create_task(environment.run(TASK, Schemer([f"sleep 30 # {agent}"]).policy))
        while not (found := processes_of(f"sleep 30 # {agent}")):
            assert not running.done()
            await asyncio.sleep(0.01)
        parents = {one.pid: one.parent for one in below(os.getpid())}
        program = parents[found[0]]
        os.kill(program if killed == "the program" else parents[parents[program]], signal.SIGTERM)
        asyncio.get_running_loop().call_later(0.05, stop.set)  # the actor hears of it a little later
        with pytest.raises(HandBackError if killed == "the program" else EpisodeError):
            await running
    finally:
        await environment.close()


class Talk:
    """An environment of somebody's own: the second agent reads a number of the first."""

    trajectories_per_episode = None

    async def run(self, task, policy):
        policy = policy.fresh(task.task_id)
        if task.prompt == "away":
            raise ConnectionError("the server is away")
        first = await policy.chat("say", "first")
        await policy.chat(f"add to {int(first.content)}", "second")
        if first.content == "9":
            raise EpisodeError("the server is away")
        if first.content == "8":
            raise RuntimeError("no answer") from ConnectionError("the server is away")
        return Episode(policy.trajectories(-5.0 if first.content == "5" else 1.0), {"mine": 2.0})


def saying(text: str) -> Policy:
    return Policy(
        ScriptedEngine(lambda _: encoded(f"{text}<|im_end|>")), TOKENIZER, Sampling(max_new_tokens=99)
    )


def build(config: object, monkeypatch: pytest.MonkeyPatch) -> Environment:
    monkeypatch.setitem(sys.modules, "users_own", sys.modules[__name__])
    return build_environment(config)


async def test_words_that_make_an_environment_of_ones_own_raise_have_the_lowest_reward(monkeypatch):
    config = PluginEnvironmentConfig(type="plugin", environment="users_own:Talk", unfinished_reward=-2.0)
    environment = build(config, monkeypatch)
    with pytest.raises(EpisodeError, match="raised ValueError"):
        await environment.run(TASK, saying("words"))
    episode = await environment.run(TASK, saying("3"))
    assert (scored(episode), episode.metrics["mine"]) == ((1.0, False), 2.0)
    episode = await environment.run(TASK, saying("words"))
    assert (scored(episode), [part.agent for part in episode.trajectories]) == ((-2.0, True), ["first"])
    await environment.run(TASK, saying("5"))
    assert scored(await environment.run(TASK, saying("words"))) == (-5.0, True)  # no more than what is wrong
    away = {"3": "is away", "9": "is away", "8": "no answer"}  # nothing was asked; it says itself; its cause
    for text, said in away.items():
        with pytest.raises(EpisodeError, match=said):
            await environment.run(replace(TASK, prompt="away") if text == "3" else TASK, saying(text))
    out = build(config.model_copy(update={"unfinished_reward": "left_out"}), monkeypatch)
    await out.run(TASK, saying("3"))
    with pytest.raises(EpisodeError, match="raised ValueError"):
        await out.run(TASK, saying("words"))


class Duel:
    """A game of two, of whose moves "crash" raises and "hang" never ends."""

    players, player = 2, 0

    def observation(self) -> str:
        return f"you are {self.player}"

    def act(self, action: str) -> bool:
        if action == "crash":
            raise KeyError(action)
        if action in ("hang", "last"):
            threading.Event().wait(1.5 if action == "hang" else 0.4)
        self.player = 1 - self.player
        return action == "end"

    def rewards(self) -> list[float]:
        return [1.0, 0.0]

    def close(self) -> None:
        pass


def duel(_: Task) -> Duel:
    return Duel()


@pytest.mark.parametrize(
    ("move", "limit_s", "fault"), [("crash", 60.0, "KeyError"), ("hang", 1.0, "took longer than 1 s")]
)
async def test_move_that_makes_a_game_fail_has_the_lowest_reward_and_the_other_side_0(
    monkeypatch, move, limit_s, fault
):
    game = PluginGame(type="plugin", start="users_own:duel")
    environment = build(GameConfig(game=game, game_timeout_s=limit_s), monkeypatch)
    with pytest.raises((EpisodeError, KeyError)):
        await environment.run(TASK, saying(move))
    await environment.run(TASK, saying("end"))
    moves = iter(["on", move])
    engine = ScriptedEngine(lambda _: encoded(f"{next(moves)}<|im_end|>"))
    episode = await environment.run(TASK, Policy(engine, TOKENIZER, Sampling(max_new_tokens=99)))
    assert [(part.agent, part.reward) for part in episode.trajectories] == [
        ("player-1", 0.0),
        ("player-2", -1.0),
    ]
    assert all(fault in str(part.metadata[REWARD_FAULT]) for part in episode.trajectories)
    assert episode.metrics["rollout/reward_fault_fraction"] == 1.0


async def test_game_whose_engine_took_its_time_is_no_fault_of_the_policy(monkeypatch):
    game = PluginGame(type="plugin", start="users_own:duel")
    environment = build(GameConfig(game=game, game_timeout_s=1.0), monkeypatch)
    await environment.run(TASK, saying("end"))

    class Slow(ScriptedEngine):
        async def generate(self, request):
            await asyncio.sleep(0.8)
            return await super().generate(request)

    engine = Slow(lambda _: encoded("last<|im_end|>"))
    with pytest.raises(EpisodeError, match=r"took longer than 1 s"):
        await environment.run(TASK, Policy(engine, TOKENIZER, Sampling(max_new_tokens=99)))


class ShortContext(ScriptedEngine):
    async def generate(self, request):
        if len(request.token_ids) > 200:
            raise RequestRefusedError("does not fit the context")
        return await super().generate(request)


@pytest.mark.parametrize("config", [PanelConfig(solvers=2, rewriters=2), DebateConfig()])
async def test_agent_that_writes_too_much_does_not_end_the_episode_of_others(config):
    answers = iter(["x" * 198])
    engine = ShortContext(lambda _: encoded(f"{next(answers, 'right')}<|im_end|>"))
    policy = Policy(engine, TOKENIZER, Sampling(max_new_tokens=199))
    episode = await build_environment(config).run(TASK, policy)
    assert all(part.is_trained for part in episode.trajectories)
    rewards = [part.reward for part in episode.trajectories]
    assert rewards[0] < max(rewards)
