"""Plays environments of others with a scripted policy."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from actors.engines.base import Sampling
from actors.environments.build import build_environment
from actors.episodes.episode import Episode
from actors.episodes.task import Task
from actors.policy.policy import Policy
from actors.settings.agents import AgentConfig
from benchmarks.scripted_engine import ScriptedEngine
from launch.external_environments.environment import ADAPTERS, PROCESS
from tests.actors.gateway.served import TOKENIZER, script

Play = Callable[..., Any]


def command_of(adapter: str, name: str, settings: Mapping[str, Any]) -> list[str]:
    """The command of an adapter in the Python of the tests."""
    return ["{python}", str(PROCESS), str(ADAPTERS / f"{adapter}_adapter.py"), name, json.dumps(settings)]


@asynccontextmanager
async def playing(config: AgentConfig, answering: Callable[[str], str]) -> AsyncIterator[Play]:
    """Yield what plays one task for each entry, all at once."""
    environment = build_environment(config)
    policy = Policy(ScriptedEngine(script(answering)), TOKENIZER, Sampling(max_new_tokens=400))

    async def play(entries: Sequence[object], **more: Any) -> list[Episode]:
        tasks = [
            Task(task_id=f"g{number:08d}.0", prompt="row", metadata={"entry": entry}, **more)
            for number, entry in enumerate(entries)
        ]
        return await asyncio.gather(*(environment.run(task, policy) for task in tasks))

    try:
        yield play
    finally:
        await environment.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of prompts."""
    return [json.loads(line) for line in path.read_text().splitlines()]
