"""An agent of smolagents, whose every request writes its history anew as text."""

import json
import os
import sys
from pathlib import Path
from urllib.request import Request, urlopen

from smolagents import OpenAIModel, ToolCallingAgent, tool

task = {**json.loads(Path(os.environ["SLUICE_TASK"]).read_text()), **json.load(sys.stdin)}


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b


model = OpenAIModel(model_id="gpt-5", api_base=os.environ["OPENAI_BASE_URL"])
agent = ToolCallingAgent(tools=[add], model=model, verbosity_level=0, max_steps=4)
answer = agent.run(task["prompt"])
reward = float(str(answer) == task["label"])
urlopen(Request(task["reward_url"], json.dumps(reward).encode()), timeout=30).read()
