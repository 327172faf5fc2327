"""What the episodes of `launch bench episodes` do: chat, call tools, or come through the gateway."""

import asyncio
import json
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal, TypeAlias

from actors.environments.base import Environment
from actors.environments.tools import ToolChat
from actors.episodes.episode import Episode
from actors.episodes.task import ChatMessage, Task
from actors.gateway.server import Gateway
from actors.policy.policy import Policy
from actors.settings.gateway import GatewayConfig
from actors.settings.tool_chat import ToolsConfig
from benchmarks.gateway_client import client
from bus.codec import Json
from bus.errors import EngineError
from bus.waiting import cancelled

Kind: TypeAlias = Literal["chat", "gateway", "calculator", "sandbox"]
QUESTION = "what follows from this, and what will you do next about it? tell me all of it, in two lines"
"""With the answer and the template's own it makes 128 tokens a turn."""
ANSWERS: dict[Kind, Sequence[str]] = {
    "chat": ("the answer has thirty two tokens",),
    "gateway": ("the answer has thirty two tokens",),
    "calculator": (
        "two of these and three of those, and so on up to here, come to <calculator>2+3*4</calculator>",
    ),
    "sandbox": (
        "<shell>sed -i s/x-1/x+1/ f.py\nseq 100 240</shell>",
        "<shell>python3 f.py\nseq 100 240</shell>",
    ),
}
"""What the policy says, in turns."""
REPOSITORY: dict[str, Json] = {"f.py": "def f(x):\n    return x-1\n"}


class Turns:
    """An environment that asks again after each answer."""

    trajectories_per_episode: int | None = 1

    def __init__(self, turns: int) -> None:
        self._turns = turns

    async def run(self, task: Task, policy: Policy) -> Episode:
        """Ask as often as configured."""
        policy = policy.fresh(task.task_id)
        messages: list[ChatMessage] = list(task.messages)
        for _ in range(self._turns):
            completion = await policy.chat(messages)
            messages += [completion.message, {"role": "user", "content": QUESTION}]
        return Episode(policy.trajectories(1.0))


class ThroughGateway:
    """An environment whose conversations a client in another process holds, by the gateway."""

    trajectories_per_episode: int | None = 1

    def __init__(self, gateway: Gateway, talker: Process) -> None:
        self._gateway = gateway
        self._talker = talker
        self._ended: dict[str, asyncio.Future[None]] = {}

    async def run(self, task: Task, policy: Policy) -> Episode:
        """Wait until the client has held the conversation."""
        assert self._talker.stdin is not None
        policy = policy.fresh(task.task_id)
        async with self._gateway.session(policy, task.task_id) as session:
            url = self._gateway.url_of(session)
            ended = self._ended[url] = asyncio.get_running_loop().create_future()
            self._talker.stdin.write(f"{url}\n".encode())
            await ended
            return Episode(policy.trajectories(1.0))

    async def listen(self) -> None:
        """Note which conversations have ended. Raises `EngineError` when the client ends."""
        assert self._talker.stdout is not None
        async for line in self._talker.stdout:
            url, _ = json.loads(line)
            self._ended.pop(url).set_result(None)
        raise EngineError("the client of the bench has ended: see above")


@asynccontextmanager
async def environment_of(kind: Kind, turns: int, episodes: int) -> AsyncIterator[Environment]:
    """Yield the environment of episodes of a kind, so many of which run at once."""
    if kind == "chat":
        yield Turns(turns)
    elif kind == "gateway":
        async with _through_gateway(turns, episodes) as conversations:
            yield conversations
    else:
        environment = ToolChat.from_config(_tool_chat(kind, turns, episodes))
        try:
            yield environment
        finally:
            await environment.close()


def _tool_chat(kind: Literal["calculator", "sandbox"], turns: int, episodes: int) -> ToolsConfig:
    tool: dict[str, object] = {"type": "calculator"}
    if kind == "sandbox":
        tool = {"type": "sandbox", "offers": ["shell"], "memory_mb": 64, "disk_mb": 4, "at_once": episodes}
    return ToolsConfig.model_validate({
        "type": "tools", "calls": "tags", "max_turns": turns, "reward": "last_number", "tools": [tool],
        "timeout_s": 3600.0,
    })  # fmt: skip


@asynccontextmanager
async def _through_gateway(turns: int, episodes: int) -> AsyncIterator[ThroughGateway]:
    gateway = Gateway(GatewayConfig(most_turns=turns))
    await gateway.start()
    talker = await client(episodes, turns, QUESTION)
    environment = ThroughGateway(gateway, talker)
    listening = asyncio.create_task(environment.listen())
    try:
        yield environment
    finally:
        await cancelled(listening)
        assert talker.stdin is not None
        talker.stdin.close()  # it ends then
        await talker.wait()
        await gateway.close()
