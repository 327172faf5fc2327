"""Programs of agents, and which of them run."""

from contextlib import suppress

import psutil

HEAD = """
import json, os, sys, time, urllib.request
def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=20))
def ask(text):
    body = {"model": os.environ["SLUICE_MODEL"], "messages": [{"role": "user", "content": text}]}
    answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    return answer["choices"][0]["message"]["content"]
def reward(value):
    post(given["reward_url"], value)
task = json.load(open(os.environ["SLUICE_TASK"]))
given = json.loads(sys.stdin.read() or "{}")
"""


def running(word: str) -> list[int]:
    """Return the processes of this host that have a word in their command lines."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(word in argument for argument in process.cmdline()):
                found.append(process.pid)
    return found
