"""Programs that would pay themselves."""

import json
from collections.abc import Sequence

from actors.engines.base import Sampling
from actors.policy.policy import Policy
from benchmarks.scripted_engine import ScriptedEngine
from tests.actors.gateway.served import TOKENIZER, encoded

VERIFIER = """
import json, os, sys, time, urllib.request
given = json.load(sys.stdin)
assert os.getcwd() != given["directory"]
time.sleep(0.2)  # what the agent left behind would have its time
reward = float(given["answer"] == given["label"])
urllib.request.urlopen(urllib.request.Request(given["reward_url"], json.dumps(reward).encode()), timeout=20)
"""


class Schemer:
    """A policy that runs one command after the other, and notes what it saw."""

    def __init__(self, commands: Sequence[str], answer: str = "done") -> None:
        self.seen: list[str] = []
        self._commands = [*commands]
        self._answer = answer
        self.engine = ScriptedEngine(self._next)
        self.policy = Policy(self.engine, TOKENIZER, Sampling(max_new_tokens=4096))

    def _next(self, tokens: Sequence[int]) -> list[int]:
        text = TOKENIZER.decode(list(tokens))
        if "aside" in text:
            return encoded("x<|im_end|>")
        self.seen.append(text)
        if not self._commands:
            return encoded(f"{self._answer}<|im_end|>")
        call = json.dumps({"name": "shell", "arguments": {"command": self._commands.pop(0)}})
        return encoded(f"<tool_call>{call}</tool_call><|im_end|>")
