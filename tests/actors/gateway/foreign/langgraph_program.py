"""An agent of langgraph on langchain-openai: one that is invoked, and one that streams."""

import json
import os
import sys
from pathlib import Path
from urllib.request import Request, urlopen

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

task = {**json.loads(Path(os.environ["SLUICE_TASK"]).read_text()), **json.load(sys.stdin)}


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


graph = create_react_agent(ChatOpenAI(model="gpt-5"), [add])
invoked = graph.invoke({"messages": [("user", task["prompt"])]})["messages"][-1].content
streamed = ""
for message, _ in graph.stream({"messages": [("user", f"again: {task['prompt']}")]}, stream_mode="messages"):
    if message.type == "AIMessageChunk":
        streamed += message.content
reward = float(invoked == task["label"] and streamed.endswith(task["label"]))
urlopen(Request(task["reward_url"], json.dumps(reward).encode()), timeout=30).read()
