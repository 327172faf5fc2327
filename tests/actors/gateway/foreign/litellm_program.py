"""An agent on litellm: two conversations of one episode, as OpenAI and, streamed, as Anthropic speak."""

import json
import os
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import litellm

task = {**json.loads(Path(os.environ["SLUICE_TASK"]).read_text()), **json.load(sys.stdin)}
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": NUMBERS}}


def answered(model: str, manner: str, *, stream: bool) -> str:
    """Ask until the model calls no tool any more."""
    messages = [{"role": "system", "content": manner}, {"role": "user", "content": task["prompt"]}]
    while True:
        given = litellm.completion(model=model, messages=messages, tools=[TOOL], stream=stream)
        reply = litellm.stream_chunk_builder(list(given), messages) if stream else given
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            numbers = json.loads(call.function.arguments)
            result = str(numbers["a"] + numbers["b"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


said = [
    answered("openai/gpt-5", "be brief", stream=False),
    answered("anthropic/claude-sonnet-4-5", "be terse", stream=True),
]
reward = sum(answer == task["label"] for answer in said) / len(said)
urlopen(Request(task["reward_url"], json.dumps(reward).encode()), timeout=30).read()
