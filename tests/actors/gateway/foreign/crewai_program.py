"""A crew of crewai: an agent with a tool, and one without, whose task goes on from the first one's."""

import json
import os
import sys
from pathlib import Path
from urllib.request import Request, urlopen

task = {**json.loads(Path(os.environ["SLUICE_TASK"]).read_text()), **json.load(sys.stdin)}
os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "CREWAI_TRACING_ENABLED": "false"}

from crewai import LLM, Agent, Crew, Task  # noqa: E402 - it reads these variables when it is loaded
from crewai.tools import tool  # noqa: E402


@tool("add")
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


model = LLM(model="openai/gpt-5")
solver = Agent(role="solver", goal="solve", backstory="brief", tools=[add], llm=model)
checker = Agent(role="checker", goal="check", backstory="terse", llm=model)
solve = Task(description=task["prompt"], expected_output="a number", agent=solver)
check = Task(description="Repeat it.", expected_output="a number", agent=checker, context=[solve])
Crew(agents=[solver, checker], tasks=[solve, check]).kickoff()
reward = float(solve.output.raw == task["label"])
urlopen(Request(task["reward_url"], json.dumps(reward).encode()), timeout=30).read()
