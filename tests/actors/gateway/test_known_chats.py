"""What is known of a chat that a request repeats means the same, and is not read again."""

import json
from copy import deepcopy

import pytest

from actors.gateway.dialects import openai_chat
from actors.gateway.dialects.openai_chat import OPENAI_CHAT, KnownChats
from actors.gateway.dialects.refusal import RefusedError

TURNS = 30
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def body(*messages: object, **more: object) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **more}).encode()


def chat(turns: int, question: str = "one and one") -> list[dict[str, object]]:
    said: list[dict[str, object]] = [{"role": "developer", "content": question, "own": 1}]
    for turn in range(turns):
        said.append({"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [CALL]})
        said.append({"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": str(turn)}]})
    return said


def test_every_message_of_a_growing_chat_is_read_once(monkeypatch):
    read, given = [], openai_chat._message
    monkeypatch.setattr(openai_chat, "_message", lambda one: read.append(one) or given(one))
    known, whole = KnownChats(), chat(TURNS)
    for turn in range(TURNS + 1):
        for question in ("one and one", "a title"):  # two agents of a session, in turns
            known.read(body(*chat(turn, question)))
    assert len(read) == 2 * len(whole)


def test_requests_that_repeat_a_chat_mean_what_they_mean_alone():
    known, said = KnownChats(), chat(6)
    for cut in (1, 5, 13):
        assert known.read(body(*said[:cut], n=2)) == OPENAI_CHAT.parse(body(*said[:cut], n=2))
    changes = {"content": "else", "role": "user", "reasoning_content": "so", "tool_calls": [], "name": "x"}
    for number in range(len(said)):
        for key, value in changes.items():
            other = deepcopy(said)
            other[number][key] = value
            assert known.read(body(*other)) == OPENAI_CHAT.parse(body(*other)), (number, key)
    for requested in (body(*said), body(*said), body(*said[:3]), body(said[0]), body(*said, *chat(3))):
        assert known.read(requested) == OPENAI_CHAT.parse(requested)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"role": "assistant", "content": 1}, r"messages\.3\.content"),
        ({"role": "nobody"}, r"messages\.3\.role"),
        ({"role": "user", "content": [{"type": "audio"}]}, "content of type 'audio'"),
    ],
)
def test_what_is_wrong_is_named_by_its_place_in_the_whole_chat_and_is_not_kept(wrong, says):
    known, said = KnownChats(), chat(1)
    known.read(body(*said))
    for _ in range(2):
        with pytest.raises(RefusedError, match=says):
            known.read(body(*said, wrong))
    for raw in (b"[]", b"no JSON", b'{"messages": 1}', b'{"messages": []}', b"{}", b'{"messages": {"a": 1}}'):
        with pytest.raises(RefusedError) as expected:
            OPENAI_CHAT.parse(raw)
        with pytest.raises(RefusedError) as refused:
            known.read(raw)
        assert str(refused.value) == str(expected.value)
