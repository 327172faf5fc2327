"""A turn of a long chat costs what one of a short chat does, but for copies of its tokens."""

import sys
import threading
from collections import Counter
from copy import deepcopy
from types import FrameType

import pytest

from actors.engines.base import Sampling
from actors.episodes.task import FixedMessages
from actors.policy.conversation import read_chat
from actors.policy.policy import Policy
from actors.policy.shown_images import ShownImages
from benchmarks.scripted_engine import ScriptedEngine
from tests.actors.policy.families import FAMILIES, TOOLS

QWEN = FAMILIES["qwen3"]
CALL = QWEN.write_calls([("add", {"a": 1})])
TURNS = 30


class Calls(Counter[int]):
    """Counts the Python functions that are entered, in all threads, by turn."""

    turn = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        self[self.turn] += event == "call"


@pytest.fixture
def calls():
    counted = Calls()
    threading.setprofile(counted)
    sys.setprofile(counted)
    yield counted
    sys.setprofile(None)
    threading.setprofile(None)


def policy_that_says(text: str) -> Policy:
    tokenizer = QWEN.tokenizer
    answer = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    return Policy(ScriptedEngine(lambda _: answer), tokenizer, Sampling(max_new_tokens=99))


async def test_no_turn_reads_again_what_was_said_before(calls):
    encode = QWEN.tokenizer.encode
    answer = [
        *encode(QWEN.write_calls([("add", {"a": 1})]), add_special_tokens=False),
        QWEN.tokenizer.eos_token_id,
    ]
    policy = Policy(ScriptedEngine(lambda _: answer), QWEN.tokenizer, Sampling(max_new_tokens=99))
    messages = [{"role": "user", "content": "one and one"}]
    for turn in range(TURNS):
        given = deepcopy(messages)  # as a client of the gateway repeats it: equal, and other objects
        calls.turn = turn
        completion = await policy.chat(given, tools=TOOLS)
        calls.turn = -1
        [call] = completion.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "two" * 9}
        messages += [completion.message, result]
    [trajectory] = policy.trajectories(1.0)
    assert (len(trajectory.turns), trajectory.metadata) == (TURNS, {})
    assert calls[TURNS - 1] < 1.1 * calls[5]


class Message(dict):
    """Counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Message.compared += 1
        return super().__eq__(other)

    __hash__ = None


def test_messages_that_nobody_changes_are_not_compared():
    said = [Message(role="user", content=str(number)) for number in range(9)]
    known = read_chat(FixedMessages(said[:6]), ShownImages())
    chat = read_chat(FixedMessages(said), ShownImages(), [known])
    assert (Message.compared, len(chat.checked)) == (0, 9)
    assert all(a is b for a, b in zip(chat.checked[:6], known.checked, strict=True))
    assert read_chat(said, ShownImages(), [read_chat(said, ShownImages())]).prints == chat.prints
    assert Message.compared > 0, "whoever keeps the messages may have changed them"


@pytest.mark.parametrize("part", [False, True])
async def test_what_an_environment_changes_in_place_is_read_again(part):
    policy = policy_that_says("two")
    asked = {"role": "user", "content": [{"type": "text", "text": "one"}] if part else "one"}
    completion = await policy.chat([asked])
    if part:
        asked["content"][0]["text"] = "three"
    else:
        asked["content"] = "three"
    await policy.chat([asked, completion.message, {"role": "user", "content": "go on"}])
    _, second = policy.trajectories(1.0)
    assert "three" in QWEN.tokenizer.decode(second.token_ids)


@pytest.mark.parametrize("other", [True, 1.0])
async def test_an_equal_number_of_another_kind_is_read_as_it_is_written(other):
    def called_with(number):
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": number}}}
        result = {"role": "tool", "tool_call_id": "1", "content": "two"}
        return [{"role": "user", "content": "y"}, {"role": "assistant", "tool_calls": [call]}, result]

    policy, fresh = policy_that_says("two"), policy_that_says("two")
    await policy.chat(called_with(1), tools=TOOLS)
    await policy.chat(called_with(other), tools=TOOLS)
    await fresh.chat(called_with(other), tools=TOOLS)
    [whole], [*_, found] = fresh.trajectories(1.0), policy.trajectories(1.0)
    assert found.token_ids.tolist() == whole.token_ids.tolist()
