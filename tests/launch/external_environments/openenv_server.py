"""A server of openenv that asks for a number until it hears it; it prints its URL."""

import socket

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
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


listening = socket.create_server(("127.0.0.1", 0))
print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)  # noqa: T201 - whoever starts it reads this
app = create_fastapi_app(Guess, Said, Seen, max_concurrent_envs=8)
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listening])
