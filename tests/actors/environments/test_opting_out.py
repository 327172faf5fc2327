"""A policy does not gain by keeping its episode from being scored; what the host breaks stays an error."""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from actors.environments.agent import AgentEnvironment
from actors.episodes.episode import Episode
from actors.episodes.errors import EpisodeError
from actors.episodes.policy_faults import REWARD_FAULT
from actors.episodes.task import Task
from actors.programs import runner
from actors.rewards.base import RewardError
from actors.rollouts.worker import end_after
from actors.settings.agents import AgentConfig
from tests.actors.environments.test_payment import Schemer

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

    async def run(*commands: str, task: Task = TASK) -> Episode:
        return await environment.run(task, Schemer([*commands]).policy)

    try:
        yield run
    finally:
        await environment.close()


def there(paths: list[str]) -> list[str]:
    """Return those of the paths that exist."""
    return [path for path in paths if Path(path).exists()]


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
    limits = {"reward_timeout_s": 2.0, "most_output_bytes": 1 << 20, "programs_at_once": 4}
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


async def test_program_that_the_host_kills_is_nobodys_fault(tmp_path: Path, monkeypatch):
    async with agents(tmp_path) as run:
        await run("true")
        kills = iter(range(100))
        monkeypatch.setattr(runner, "kills_for_memory", lambda: next(kills))
        with pytest.raises(EpisodeError, match=r"no memory left and killed a process.*status -9") as failed:
            await run("kill -9 $PPID")
        assert end_after(failed.value) == "environment_error"
        assert scored(await run("echo right > answer.txt")) == (1.0, False)  # it ended well all the same


async def test_failures_stay_out_where_the_settings_say_so(tmp_path: Path):
    async with agents(tmp_path, unfinished_reward=None) as run:
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


async def test_verifier_that_cannot_judge_nothing_is_refused_before_it_judges(tmp_path: Path):
    verifier = VERIFIER.replace(" if os.path.exists(path) else ''", "").replace(
        ' if os.path.exists(path) else ""', ""
    )
    async with agents(tmp_path, verifier) as run:
        with pytest.raises(RewardError, match="fails on an empty directory and answer"):
            await run("echo right > answer.txt")


async def test_slow_engine_is_no_fault_of_the_policy(tmp_path: Path):
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    settings = {"reward": "exact", "program_timeout_s": 0.6}
    environment = AgentEnvironment.from_config(
        AgentConfig(command=f"{sys.executable} -S {agent}", **settings)
    )
    try:
        await environment.run(TASK, Schemer([]).policy)
        schemer = Schemer(["true"])
        answered = schemer.engine.generate

        async def slow(request):
            if schemer.seen:
                await asyncio.Event().wait()
            return await answered(request)

        schemer.engine.generate = slow
        with pytest.raises(EpisodeError, match=r"it ran for 0\.6 s") as failed:
            await environment.run(TASK, schemer.policy)
        assert end_after(failed.value) == "timeout"
    finally:
        await environment.close()
