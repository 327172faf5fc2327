"""A policy with a shell is not paid, whatever it tries, and does not see its label."""

import asyncio
import os
import sys
import sysconfig
from pathlib import Path

import pytest

from actors.environments.agent import AgentEnvironment
from actors.environments.build import build_environment
from actors.episodes.episode import Episode
from actors.episodes.errors import EpisodeError
from actors.episodes.task import Task
from actors.programs import hidden
from actors.programs.runner import ProgramRunner
from actors.rewards.base import RewardError
from actors.settings.agents import AgentConfig
from bus.errors import ConfigError
from tests.actors.environments.agent_programs import running
from tests.actors.environments.schemers import VERIFIER, Schemer
from tests.actors.environments.ways_to_be_paid import OF_HTTP, OF_SHELL, POST

LABEL = "LABEL-73501"
REFUSED = 9
"""Requests among the ways to be paid that ask for a reward with the key of the session."""
TASK = Task(task_id="g00000000.0", prompt="earn", label=LABEL)


class Host:
    """Files that a policy would like to read or to change, and a bus that it would like to write on."""

    def __init__(self, directory: Path) -> None:
        self.run, self.prompts = directory / "run", directory / "prompts.jsonl"
        self.agent, self.verifier = directory / "agent.py", directory / "verifier.py"
        self.run.mkdir()
        (self.run / "ledger").write_text(LABEL)
        self.prompts.write_text(LABEL)
        self.agents_text = Path(__file__).with_name("shell_agent.py").read_text()
        self.agent.write_text(self.agents_text)
        self.verifier.write_text(VERIFIER)
        self.bus_port = 0
        self.connections = 0

    def command(self, text: str) -> str:
        site = sysconfig.get_path("purelib")
        words = {
            "ACTOR": os.getpid(), "AGENT": self.agent, "VERIFIER": self.verifier, "PROMPTS": self.prompts,
            "RUN": self.run, "LABEL": LABEL[:5], "PYTHON": sys.executable, "BUS": self.bus_port, "SITE": site,
        }  # fmt: skip
        for word, value in words.items():
            text = text.replace(word, str(value))
        return text

    async def connected(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        writer.close()

    async def episode(self, schemer: Schemer, **settings: object) -> Episode:
        isolation = {"readable": (self.agent.parent,)}  # so that what is hidden there is what is not seen
        given = {"reward": "posted", "isolation": isolation, **settings}
        environment = AgentEnvironment.from_config(AgentConfig(**given))
        bus = await asyncio.start_server(self.connected, "127.0.0.1", 0)
        self.bus_port = bus.sockets[0].getsockname()[1]
        schemer._commands = [self.command(text) for text in schemer._commands]
        try:
            return await environment.run(TASK, schemer.policy)
        finally:
            bus.close()
            await environment.close()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    found = Host(tmp_path)
    monkeypatch.setattr(hidden, "_hidden", {found.run, found.prompts})
    return found


def packages() -> dict[str, int]:
    """Return the installed files of these tests' Python, compiled ones left out, with times of change."""
    installed = Path(sysconfig.get_path("purelib"))
    files = [*installed.glob("*"), *installed.glob("*/*")]
    return {str(path): path.stat().st_mtime_ns for path in files if path.is_file() and path.suffix != ".pyc"}


def paid(host: Host, owner: bool) -> dict[str, object]:
    """Return settings by which the agent's own program pays, or a verifier."""
    command = f"{sys.executable} -S {host.agent}"
    if owner:
        return {"command": f"{command} owner", "program_owns_reward": True}
    return {"command": command, "verifier": f"{sys.executable} -S {host.verifier}"}


@pytest.mark.slow
@pytest.mark.parametrize("owner", [False, True], ids=["verifier", "program"])
async def test_policy_with_a_shell_is_not_paid_whatever_it_tries(host: Host, owner: bool):
    installed = packages()
    ways = {name: POST + text for name, text in {**OF_HTTP, **OF_SHELL}.items()}
    schemer = Schemer([f"echo 'way {name}'; {text}" for name, text in ways.items()])
    episode = await host.episode(schemer, **paid(host, owner))
    assert len(schemer.seen) == len(ways) + 1  # each was tried, and the agent lived to tell
    assert {part.reward for part in episode.trajectories} == {0.0}
    by = "program" if owner else "verifier"
    assert {part.reward_source for part in episode.trajectories} == {f"{by} 127.0.0.1"}
    assert episode.trajectories[0].metadata["refused_rewards"] == REFUSED
    everything = "\n".join(schemer.seen)
    assert everything.count("HTTP/1.1 403") >= REFUSED
    assert "Syntax error" not in everything
    assert LABEL not in everything
    assert "/rewards/" not in everything.replace("/rewards/$", "")
    assert host.connections == 0
    assert host.agent.read_text() == host.agents_text
    assert host.verifier.read_text() == VERIFIER
    assert packages() == installed
    assert not running("daemon.PAYMENT")


async def test_answer_that_is_right_is_paid(host: Host):
    episode = await host.episode(Schemer(["true"], answer=LABEL), **paid(host, owner=False))
    assert [part.reward for part in episode.trajectories] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("verifier", "reason"),
    [
        ("raise SystemExit('the tests are gone')", "status 1: the tests are gone"),
        ("pass", "nobody posted a reward"),
    ],
)
async def test_verifier_that_fails_is_no_reward_of_0(host: Host, verifier: str, reason: str):
    host.verifier.write_text(verifier)
    with pytest.raises(RewardError, match=reason):
        await host.episode(Schemer([]), **paid(host, owner=False))


def test_agent_whose_reward_nobody_posts_is_refused_at_start_up():
    with pytest.raises(ConfigError, match=r"--reward exact.*environment\.verifier.*program-owns-reward"):
        build_environment(AgentConfig(command="true", reward="posted"))
    for wrong in ({"long_lived": True}, {"program_owns_reward": True}, {"reward": "exact"}):
        with pytest.raises(ValueError, match="a verifier posts"):
            AgentConfig(**{"command": "true", "reward": "posted", "verifier": "true", **wrong})


@pytest.mark.slow
async def test_requests_pay_nothing_on_a_host_without_namespaces_either(host: Host, monkeypatch):
    monkeypatch.setattr(ProgramRunner, "_probe", lambda _: False)
    schemer = Schemer([POST + "; ".join(OF_HTTP.values())])
    episode = await host.episode(schemer, **paid(host, owner=False))
    assert {part.reward for part in episode.trajectories} == {0.0}
    assert episode.trajectories[0].metadata["refused_rewards"] == REFUSED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "command", "said"),
    [
        ({"processes": 40}, "for n in $(seq 100); do sleep 30.5 & done; wait", "fork|processes"),
        ({"memory_mb": 200}, "PYTHON -S -c 'x = bytearray(1 << 30)'", "MemoryError"),
        ({"memory_mb": 300}, "for n in 1 2 3 4; do PYTHON -S -c 'x = b\"1\" * (150 << 20); "
         "__import__(\"time\").sleep(30.5)' & done; wait", "may take 300"),
        ({"file_mb": 1}, "head -c 2000000 /dev/zero > big; ls -l big", "1048576"),
        ({"file_mb": 1}, "for n in 1 2 3 4; do head -c 600000 /dev/zero > /tmp/$n; done", "No space"),
        ({"cpu_s": 1}, "PYTHON -S -c 'while 1: pass'; echo gone", "gone"),
    ],
    ids=["processes", "memory of one", "memory of all", "a file", "its /tmp", "processor"],
)  # fmt: skip
async def test_program_that_takes_more_than_it_may_is_ended_or_refused(host: Host, limits, command, said):
    schemer = Schemer([command])
    try:
        await host.episode(schemer, isolation=limits, **paid(host, owner=False))
        heard = schemer.seen[-1]
    except EpisodeError as error:
        heard = str(error)
    assert any(word in heard for word in said.split("|")), heard
    assert not running("30.5")
