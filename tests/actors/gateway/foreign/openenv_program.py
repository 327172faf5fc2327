"""An environment of openenv behind its own server and client; the policy plays it by the openai package."""

import asyncio
import json
import os
import sys
import threading
from pathlib import Path
from urllib.request import Request, urlopen

import uvicorn
from openai import AsyncOpenAI
from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

task = {**json.loads(Path(os.environ["SLUICE_TASK"]).read_text()), **json.load(sys.stdin)}


class Said(Action):
    text: str


class Seen(Observation):
    text: str = ""


class Sum(Environment[Said, Seen, State]):
    """Asks for a sum until it hears it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id="e", step_count=0)

    def reset(self, seed=None, episode_id=None, **_):
        return Seen(text=task["prompt"], done=False, reward=None)

    def step(self, action, timeout_s=None, **_):
        self._state.step_count += 1
        right = action.text == task["label"]
        return Seen(text="tool 42" if not right else "right", done=right, reward=float(right))

    @property
    def state(self):
        return self._state


class Client(EnvClient[Said, Seen, State]):
    def _step_payload(self, action):
        return action.model_dump()

    def _parse_result(self, payload):
        seen = Seen(**payload["observation"])
        return StepResult(observation=seen, reward=payload.get("reward"), done=payload.get("done"))

    def _parse_state(self, payload):
        return State(**payload)


async def play(port: int) -> float:
    openai = AsyncOpenAI()
    async with Client(base_url=f"http://127.0.0.1:{port}") as environment:
        result = await environment.reset()
        messages = []
        for _ in range(4):
            messages.append({"role": "user", "content": result.observation.text})
            answer = await openai.chat.completions.create(model="gpt-5", messages=messages)
            text = answer.choices[0].message.content
            messages.append({"role": "assistant", "content": text})
            result = await environment.step(Said(text=text))
            if result.done:
                break
    return result.reward or 0.0


async def main() -> float:
    app = create_fastapi_app(Sum, Said, Seen, max_concurrent_envs=4)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    threading.Thread(target=server.run, daemon=True).start()
    async with asyncio.timeout(30):
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
    return await play(server.servers[0].sockets[0].getsockname()[1])


reward = asyncio.run(main())
urlopen(Request(task["reward_url"], json.dumps(reward).encode()), timeout=30).read()
