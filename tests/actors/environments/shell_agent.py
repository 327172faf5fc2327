"""A small agent with a shell: it does what the policy says, and shows the policy what came of it.

With the argument `owner` it reads from its standard input what its reward is posted with, and pays 0."""

import ctypes
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

TOOL = {"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}
MOST_CHARACTERS = 400
PR_SET_DUMPABLE = 4


def post(url: str, body: object) -> dict:
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def ask(messages: list[dict]) -> dict:
    body = {"model": "any", "messages": messages, "tools": [TOOL]}
    return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]


def shown(command: str) -> str:
    """Run a command; return the end of what it wrote."""
    done = subprocess.run(
        ["sh", "-c", command], check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60
    )
    return done.stdout.decode(errors="replace")[-MOST_CHARACTERS:] + f"\nstatus {done.returncode}"


if "owner" in sys.argv:
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # what the policy starts cannot look into this one
    given = json.load(sys.stdin)
messages = [{"role": "user", "content": json.loads(Path(os.environ["SLUICE_TASK"]).read_text())["prompt"]}]
while calls := (message := ask(messages)).get("tool_calls"):
    command = json.loads(calls[0]["function"]["arguments"])["command"]
    messages = [messages[0], {"role": "user", "content": shown(command)}]  # a short context
if "owner" in sys.argv:
    post(given["reward_url"], float(message["content"] == given["label"]))
