"""Agents of other people's frameworks, each in an environment of its own, are trained as they are.

`SLUICE_TEST_AGENTS` names a directory that keeps the environments from one run of tests to the next."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from actors.engines.base import Sampling
from actors.environments.agent import AgentEnvironment
from actors.episodes.episode import AgentTrajectory, Episode
from actors.episodes.task import Task
from actors.policy.policy import Policy
from actors.settings.agents import AgentConfig
from benchmarks.scripted_engine import ScriptedEngine
from tests.actors.gateway.prepared_environments import PREPARE_S, prepared
from tests.actors.gateway.served import END, TOKENIZER, encoded, script

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(900)]
PROGRAMS = Path(__file__).with_name("foreign")
CALL = 'I add.<tool_call>{"name": "add", "arguments": {"a": 40, "b": 2}}</tool_call>'
FINAL_CALL = '<tool_call>{"name": "final_answer", "arguments": {"answer": "42"}}</tool_call>'
TASK = Task(task_id="g00000000.0", prompt="40+2?", label="42")
BEGIN = "<|im_start|>"


@dataclass(frozen=True)
class Foreign:
    """A framework, the packages that it needs, and what its program has the policy answer."""

    name: str
    packages: tuple[str, ...]
    answers: tuple[str, ...]
    """What is sampled, in order of the requests."""
    trajectories: int
    """How many strands that gives."""


AGENTS = [
    Foreign("openai_agents", ("openai-agents>=0.24,<1",), (CALL, "42", CALL, "42"), 2),
    Foreign("langgraph", ("langgraph>=1.2,<2", "langchain-openai>=1.7,<2"), (CALL, "42", CALL, "42"), 2),
    Foreign("pydantic_ai", ("pydantic-ai-slim[openai]>=2,<3",), (CALL, "42", CALL, "42"), 2),
    Foreign("litellm", ("litellm>=1.110,<2",), (CALL, "42", CALL, "42"), 2),
    Foreign("crewai", ("crewai>=1.15,<2",), (CALL, "42", "wrong"), 3),
    Foreign("smolagents", ("smolagents[openai]>=1.26,<2",), (CALL, FINAL_CALL), 2),
    Foreign("verifiers", ("verifiers>=0.4,<0.5",), (CALL, "42"), 1),
    Foreign("google_adk", ("google-genai>=2,<3", "google-adk>=2,<3"), (CALL, "42", "wrong", CALL, "42"), 3),
    Foreign("openenv", ("openenv>=0.10,<0.11", "openai>=2,<4"), ("wrong", "42"), 1),
]


@pytest.fixture(scope="session")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of all environments."""
    kept = os.environ.get("SLUICE_TEST_AGENTS")
    return Path(kept) if kept else tmp_path_factory.mktemp("agents")


def answering(prompt: str) -> str:
    """Call a tool; once its result is there, give the final answer in the way that the agent wants it."""
    has_result = "tool 42" in prompt or "Observation:\n42" in prompt
    if not has_result:
        return CALL if "add" in prompt.partition("<|im_end|>")[0] or "'add'" in prompt else "wrong"
    return FINAL_CALL if "final_answer" in prompt else "42"


def sampled(trajectories: Sequence[AgentTrajectory]) -> list[list[int]]:
    """What the loss mask marks of each turn, in order."""
    return [
        trajectory.token_ids[turn.start : turn.stop][trajectory.loss_mask[turn.start : turn.stop]].tolist()
        for trajectory in trajectories
        for turn in trajectory.turns
    ]


async def played(command: str, engine: ScriptedEngine, **settings: object) -> Episode:
    """The episode of a program that posts its reward."""
    environment = AgentEnvironment.from_config(
        AgentConfig(
            command=command,
            reward="posted",
            program_owns_reward=True,
            program_timeout_s=180,
            variables={"OPENAI_AGENTS_DISABLE_TRACING": "1"},
            **settings,
        )
    )
    try:
        return await environment.run(TASK, Policy(engine, TOKENIZER, Sampling(max_new_tokens=256)))
    finally:
        await environment.close()


def assert_exact(episode: Episode, engine: ScriptedEngine) -> None:
    """Each turn's context is what the engine was given, and the reward was posted."""
    assert {part.reward for part in episode.trajectories} == {1.0}
    assert {part.end for part in episode.trajectories} == {"completed"}
    asked = [list(request.token_ids) for request in engine.requests]
    recorded = [part.token_ids[: turn.start].tolist() for part in episode.trajectories for turn in part.turns]
    assert sorted(recorded) == sorted(asked)


@pytest.mark.parametrize("foreign", AGENTS, ids=lambda foreign: foreign.name)
async def test_foreign_agent_is_recorded_token_by_token_with_the_reward_that_it_posts(
    foreign: Foreign, environments: Path
):
    python = await asyncio.to_thread(prepared, environments / foreign.name, foreign.packages)
    engine = ScriptedEngine(script(answering))
    episode = await played(f"{python} {PROGRAMS / foreign.name}_program.py", engine)
    assert_exact(episode, engine)
    assert len(episode.trajectories) == foreign.trajectories
    assert sampled(episode.trajectories) == [encoded(f"{text}<|im_end|>") for text in foreign.answers]


CODING_AGENTS = {
    "codex": ("@openai/codex", "exec_command", {"cmd": "expr 40 + 2"}),
    "gemini": ("@google/gemini-cli", "run_shell_command", {"command": "expr 40 + 2"}),
    "claude": ("@anthropic-ai/claude-code", "Bash", {"command": "expr 40 + 2", "description": "adds"}),
    "qwen": ("@qwen-code/qwen-code", "run_shell_command", {"command": "expr 40 + 2", "is_background": False}),
    "opencode": ("opencode-ai", "bash", {"command": "expr 40 + 2", "description": "adds"}),
}
"""Coding agents by the names of their programs: their packages, and the call by which each runs a command."""


def installed(directory: Path) -> Path:
    """Return the directory of the coding agents' programs, which are installed unless they are there."""
    programs = directory / "node_modules/.bin"
    if not all((programs / name).exists() for name in CODING_AGENTS):
        packages = [package for package, *_ in CODING_AGENTS.values()]
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", directory, *packages]
        subprocess.run(command, check=True, timeout=PREPARE_S)
    return programs


def written(tool: str, arguments: dict[str, object]) -> str:
    """A call as the policy writes it."""
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


async def coded(environments: Path, name: str, engine: ScriptedEngine) -> Episode:
    """The episode of a coding agent, which is recorded token by token."""
    programs = await asyncio.to_thread(installed, environments / "cli")
    episode = await played(
        f"{sys.executable} {PROGRAMS / 'cli_program.py'} {programs / name} {name}",
        engine,
        isolation={"readable": (environments / "cli",)},
        gateway={"unmeetable": "ignore"},
    )
    assert_exact(episode, engine)
    return episode


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not here")
@pytest.mark.parametrize("name", CODING_AGENTS)
async def test_coding_agent_is_recorded_token_by_token_with_its_defaults(name: str, environments: Path):
    _, tool, arguments = CODING_AGENTS[name]
    call = written(tool, arguments)

    def answering(prompt: str) -> str:
        offered = tool in prompt.partition(END)[0]
        return "42" if f"{BEGIN}tool " in prompt else call if offered else "a title"

    episode = await coded(environments, name, ScriptedEngine(script(answering)))
    called = [part for part in episode.trajectories if len(part.turns) > 1]
    assert [len(part.turns) for part in called] == [2]
    assert sampled(called) == [encoded(f"{text}{END}") for text in (call, "42")]


SPAWNING = {
    "claude": ("Agent", {"description": "adds", "prompt": "SUB 40+2?", "subagent_type": "general-purpose"}),
    "codex": ("multi_agent_v1__spawn_agent", {"message": "SUB 40+2?"}),
}
"""Coding agents by the names of their programs: the call by which each starts a sub-agent."""
SPAWNED = re.compile(r"tool .*agent_id\W+([0-9a-f-]{36})")


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not here")
@pytest.mark.parametrize("name", SPAWNING)
async def test_sub_agents_of_coding_agents_are_recorded_apart(name: str, environments: Path):
    spawn = written(*SPAWNING[name])

    def answering(prompt: str) -> str:
        tool_answers = prompt.count(f"{BEGIN}tool ")
        if (spawned := SPAWNED.search(prompt)) and name == "codex" and tool_answers == 1:
            return written("multi_agent_v1__wait_agent", {"targets": [spawned[1]]})
        is_first = SPAWNING[name][0] in prompt.partition(END)[0] and not tool_answers
        return spawn if is_first and "SUB" not in prompt else "42"

    episode = await coded(environments, name, ScriptedEngine(script(answering)))
    assert {part.agent for part in episode.trajectories} == {"solver", "subagent-1"}
    assert sampled([part for part in episode.trajectories if part.agent != "solver"]) == [encoded(f"42{END}")]


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not here")
async def test_claude_code_shortens_its_history_where_its_prompt_is_too_long_and_goes_on(environments: Path):
    _, tool, arguments = CODING_AGENTS["claude"]

    def answering(prompt: str) -> str:
        if "<analysis>" in prompt[-5000:]:
            return "<summary>we got 42</summary>"
        if "we got 42" in prompt or tool not in prompt.partition(END)[0]:
            return "42"
        count = prompt.count(f"{BEGIN}tool ")
        return written(tool, {**arguments, "command": f"seq {1000 * count} {1000 * count + 300}"})

    def limiting(tokens: Sequence[int]) -> list[int]:
        if not hasattr(engine, "longest_context"):
            engine.longest_context = len(tokens) + 20_000
        return script(answering)(tokens)

    engine = ScriptedEngine(limiting)
    episode = await coded(environments, "claude", engine)
    before, summary, after = episode.trajectories
    assert (len(before.turns) > 5, len(summary.turns), len(after.turns)) == (True, 1, 1)
    assert max(map(len, (part.token_ids for part in episode.trajectories))) <= engine.longest_context
