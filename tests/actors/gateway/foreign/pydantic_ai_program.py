"""An agent of pydantic-ai: two models of one episode, by chat completions and by responses."""

import json
import os
import sys
from pathlib import Path
from urllib.request import Request, urlopen

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

task = {**json.loads(Path(os.environ["SLUICE_TASK"]).read_text()), **json.load(sys.stdin)}


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


said = []
for model, manner in ((OpenAIChatModel("gpt-5"), "be brief"), (OpenAIResponsesModel("gpt-5"), "be terse")):
    agent = Agent(model, instructions=manner, tools=[add])
    said.append(agent.run_sync(task["prompt"]).output)
reward = sum(answer == task["label"] for answer in said) / len(said)
urlopen(Request(task["reward_url"], json.dumps(reward).encode()), timeout=30).read()
