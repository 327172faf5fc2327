"""What is known of a chat that a request repeats means the same, and is not read again."""

import json
from copy import deepcopy

import pytest

from actors.gateway.dialects import anthropic, google, openai_chat, openai_responses
from actors.gateway.dialects.anthropic import ANTHROPIC
from actors.gateway.dialects.google import GOOGLE
from actors.gateway.dialects.known_chats import KnownChats
from actors.gateway.dialects.openai_chat import OPENAI_CHAT
from actors.gateway.dialects.openai_responses import OPENAI_RESPONSES, KeptResponses
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


def blocks(turns: int, question: str = "one and one") -> list[dict[str, object]]:
    said: list[dict[str, object]] = [{"role": "user", "content": question}]
    for turn in range(turns):
        call = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}
        result = {"type": "tool_result", "tool_use_id": "c1", "content": str(turn)}
        said.append({"role": "assistant", "content": [call]})
        said.append({"role": "user", "content": [result]})
    return said


def contents(turns: int, question: str = "one and one") -> list[dict[str, object]]:
    said: list[dict[str, object]] = [{"role": "user", "parts": [{"text": question}]}]
    for turn in range(turns):
        calls = [{"functionCall": {"name": "add", "args": {"a": number}}} for number in (1, turn)]
        results = [{"functionResponse": {"name": "add", "response": {"output": turn}}}] * 2  # without ids
        said += [{"role": "model", "parts": calls}, {"parts": results[:1]}, {"parts": results[1:]}]
    return said


def items(turns: int, question: str = "one and one") -> list[dict[str, object]]:
    tool = {"type": "function", "name": "add", "parameters": {"minimum": 1}}
    said: list[dict[str, object]] = [{"content": question}, {"type": "additional_tools", "tools": [tool]}]
    for turn in range(turns):
        said.append({"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]})
        said.append({"role": "assistant", "content": [{"type": "output_text", "text": "I add."}]})
        said.append({"type": "configuration_update"})
        said.append({"type": "function_call", "call_id": f"c{turn}", "name": "add", "arguments": "{}"})
        said.append({"type": "function_call_output", "call_id": f"c{turn}", "output": str(turn)})
    return said


CHATS = {
    OPENAI_CHAT: (chat, "messages"),
    ANTHROPIC: (blocks, "messages"),
    GOOGLE: (contents, "contents"),
    OPENAI_RESPONSES: (items, "input"),
}
"""How a chat of an API is made, and under which name requests have it."""
NAMES = ["openai", "anthropic", "google", "responses"]


def reader(dialect):
    """Return what reads a chat as that of a session, in which it is kept."""
    known, kept = KnownChats(), KeptResponses(1 << 20)

    def read(said, **more):
        raw = json.dumps({CHATS[dialect][1]: said, **more}).encode()
        return kept.read(raw).ask if dialect is OPENAI_RESPONSES else dialect.parse(raw, known)

    return read


def afresh(dialect, raw):
    if dialect is OPENAI_RESPONSES:
        return KeptResponses(1 << 20).read(raw).ask
    return dialect.parse(raw, KnownChats())


def alone(dialect, said):
    return afresh(dialect, json.dumps({CHATS[dialect][1]: said}).encode())


@pytest.mark.parametrize(
    ("dialect", "module", "name"),
    [
        (OPENAI_CHAT, openai_chat, "_message"),
        (ANTHROPIC, anthropic, "_messages"),
        (GOOGLE, google, "_assistant"),
        (OPENAI_RESPONSES, openai_responses, "_behind"),
    ],
    ids=NAMES,
)
def test_every_message_of_a_growing_chat_is_read_once(monkeypatch, dialect, module, name):
    read, given = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *of: read.append(of[-1]) or given(*of))
    reads, (says, _) = reader(dialect), CHATS[dialect]
    for turn in range(TURNS + 1):
        for question in ("one and one", "a title"):  # two agents of a session, in turns
            reads(says(turn, question))
    whole = says(TURNS) if dialect is not GOOGLE else range(TURNS)  # its answers alone, which are counted
    assert len(read) == 2 * len(whole)


@pytest.mark.parametrize("dialect", CHATS, ids=NAMES)
def test_a_chat_that_repeats_another_in_part_means_what_it_means_alone(dialect):
    reads, says = reader(dialect), CHATS[dialect][0]
    said = says(4)
    for cut in (*range(1, len(said) + 1), *range(len(said), 0, -1)):
        for further in (says(0), says(1, "else"), said[-2:]):
            asked = [*said[:cut], *further]
            assert reads(asked) == alone(dialect, asked), (cut, further)
    for number in (1, 1.0, True):  # they are equal, and are written in other ways
        asked = json.loads(json.dumps(said).replace('"a": 1}', f'"a": {json.dumps(number)}}}'))
        asked = json.loads(json.dumps(asked).replace('"minimum": 1}', f'"minimum": {json.dumps(number)}}}'))
        assert repr(reads(asked)) == repr(alone(dialect, asked))


def test_requests_of_anthropic_that_repeat_a_chat_mean_what_they_mean_alone():
    known, said = KnownChats(), blocks(3)
    begun = [*said, {"role": "assistant", "content": "It is"}]
    for messages in (said, begun, [*begun[:-1], {"role": "assistant", "content": "It is 2"}, said[0]]):
        for system in ("be brief", "be terse"):
            asked = body(*messages, system=system)
            assert ANTHROPIC.parse(asked, known) == afresh(ANTHROPIC, asked)
    assert ANTHROPIC.parse(body(*begun), known).prefix == "It is"
    for number in (1, 1.0, True):  # they are equal, and templates write them in other ways
        other = deepcopy(said)
        other[1]["content"][0]["input"]["a"] = number
        written = [message["tool_calls"] for message in afresh(ANTHROPIC, body(*other)).messages[1:2]]
        read = [message["tool_calls"] for message in ANTHROPIC.parse(body(*other), known).messages[1:2]]
        assert read == written


def test_a_chat_of_one_api_is_not_known_to_another():
    known, message = KnownChats(), {"role": "assistant", "content": "two", "tool_calls": [CALL]}
    said = body({"role": "user", "content": "one and one"}, message, {"role": "user", "content": "go on"})
    assert OPENAI_CHAT.parse(said, known) == afresh(OPENAI_CHAT, said)
    assert ANTHROPIC.parse(said, known) == afresh(ANTHROPIC, said) != afresh(OPENAI_CHAT, said)


def test_requests_that_repeat_a_chat_mean_what_they_mean_alone():
    known, said = KnownChats(), chat(6)
    for cut in (1, 5, 13):
        assert OPENAI_CHAT.parse(body(*said[:cut], n=2), known) == afresh(OPENAI_CHAT, body(*said[:cut], n=2))
    changes = {"content": "else", "role": "tool", "reasoning_content": "so", "tool_calls": [], "name": "x"}
    for number in range(len(said)):
        for key, value in changes.items():
            other = deepcopy(said)
            other[number][key] = value
            assert OPENAI_CHAT.parse(body(*other), known) == afresh(OPENAI_CHAT, body(*other)), (number, key)
    for requested in (body(*said), body(*said), body(*said[:3]), body(said[0]), body(*said, *chat(3))):
        assert OPENAI_CHAT.parse(requested, known) == afresh(OPENAI_CHAT, requested)


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
    OPENAI_CHAT.parse(body(*said), known)
    for _ in range(2):
        with pytest.raises(RefusedError, match=says):
            OPENAI_CHAT.parse(body(*said, wrong), known)
    for raw in (b"[]", b"no JSON", b'{"messages": 1}', b'{"messages": []}', b"{}", b'{"messages": {"a": 1}}'):
        with pytest.raises(RefusedError) as expected:
            afresh(OPENAI_CHAT, raw)
        with pytest.raises(RefusedError) as refused:
            OPENAI_CHAT.parse(raw, known)
        assert str(refused.value) == str(expected.value)
