"""Google's own client, and an agent of google-adk on it, with their defaults."""

import asyncio
import json
import os
import sys
from pathlib import Path
from urllib.request import Request, urlopen

from google import genai
from google.adk.agents import Agent
from google.adk.runners import InMemoryRunner
from google.genai import types

task = {**json.loads(Path(os.environ["SLUICE_TASK"]).read_text()), **json.load(sys.stdin)}


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def by_adk() -> str:
    agent = Agent(name="adder", model="gemini-2.5-flash", instruction="be brief", tools=[add])
    runner = InMemoryRunner(agent=agent, app_name="adder")
    session = await runner.session_service.create_session(app_name="adder", user_id="u")
    asked = types.Content(role="user", parts=[types.Part(text=task["prompt"])])
    said = ""
    async for event in runner.run_async(user_id="u", session_id=session.id, new_message=asked):
        if event.is_final_response():
            said = event.content.parts[0].text
    return said


client = genai.Client()
config = types.GenerateContentConfig(tools=[add])  # it calls the function itself
first = client.models.generate_content(model="gemini-2.5-flash", contents=task["prompt"], config=config).text
parts = client.models.generate_content_stream(model="gemini-2.5-flash", contents="plain", config=None)
streamed = "".join(part.text for part in parts)
assert client.models.count_tokens(model="gemini-2.5-flash", contents="plain").total_tokens > 0
said = [first, asyncio.run(by_adk())]
reward = float(said == [task["label"]] * 2 and streamed == "wrong")
urlopen(Request(task["reward_url"], json.dumps(reward).encode()), timeout=30).read()
