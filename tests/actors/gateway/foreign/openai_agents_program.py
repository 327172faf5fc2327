"""An agent of openai-agents: two models of one episode, by the two APIs that the package speaks."""

import asyncio
import json
import os
import sys
from pathlib import Path
from urllib.request import Request, urlopen

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
task = {**json.loads(Path(os.environ["SLUICE_TASK"]).read_text()), **json.load(sys.stdin)}


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def answers() -> list[str]:
    """By the package's default, which is responses, and by chat completions, streamed."""
    by_default = Agent(name="first", instructions="be brief", tools=[add], model="gpt-5")
    first = await Runner.run(by_default, task["prompt"])
    chat = OpenAIChatCompletionsModel(model="gpt-5", openai_client=AsyncOpenAI())
    by_chat = Agent(name="second", instructions="be terse", tools=[add], model=chat)
    second = Runner.run_streamed(by_chat, task["prompt"])
    async for _ in second.stream_events():
        pass
    return [first.final_output, second.final_output]


said = asyncio.run(answers())
reward = sum(answer == task["label"] for answer in said) / len(said)
urlopen(Request(task["reward_url"], json.dumps(reward).encode()), timeout=30).read()
