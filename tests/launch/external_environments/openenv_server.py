"""A server of openenv that asks for a number until it hears it, or with `tools` offers a tool for guesses;
it prints its URL."""

import socket
import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Said(Action):
    text: str


class Seen(Observation):
    text: str = ""


class Guess(Environment[Said, Seen, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id="e", step_count=0)
        self._wanted = ""

    def reset(self, seed=None, episode_id=None, **_):
        self._wanted = str(seed % 3 + 1)
        return Seen(text="Which number?", done=False, reward=None)

    def step(self, action, timeout_s=None, **_):
        right = action.text == self._wanted
        return Seen(text="another", done=right, reward=1.0 if right else -0.1)

    @property
    def state(self):
        return self._state


class Tools(MCPEnvironment):
    """Has a tool `guess`; a right guess ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("guesses")
        self._wanted = 0

        @server.tool()
        def guess(number: int) -> str:
            """Guess a number."""
            return "right" if number == self._wanted else f"{number} is wrong"

        super().__init__(server)
        self._state = State(episode_id="e", step_count=0)

    def reset(self, seed=None, episode_id=None, **_):
        self._wanted = seed % 3 + 1
        return Seen(text="Guess by the tool.", done=False, reward=None)

    async def step_async(self, action, timeout_s=None, **more):
        seen = await super().step_async(action, timeout_s=timeout_s, **more)
        if isinstance(action, CallToolAction) and isinstance(seen, CallToolObservation):
            seen.done = action.arguments.get("number") == self._wanted
            seen.reward = 1.0 if seen.done else -0.1
        return seen

    def _step_impl(self, action, timeout_s=None, **_):
        return Seen(text="no action", done=False, reward=0.0)

    @property
    def state(self):
        return self._state


listening = socket.create_server(("127.0.0.1", 0))
print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)  # noqa: T201 - whoever starts it reads this
parts = (Tools, CallToolAction, CallToolObservation) if "tools" in sys.argv else (Guess, Said, Seen)
app = create_fastapi_app(*parts, max_concurrent_envs=8)
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listening])
