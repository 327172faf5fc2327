"""A chat that goes on grows one trajectory, token for token, whatever a template would do to its history."""

import asyncio
import json
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from actors.engines.base import Sampling
from actors.policy.policy import Policy
from tests.actors.policy.families import FAMILIES, TOOLS, Family
from tests.actors.scripted_engine import ScriptedEngine

WORDS = st.text("abcer \né.", min_size=1, max_size=6).filter(lambda text: text.strip())
ARGUMENTS = st.dictionaries(st.sampled_from("ab"), st.integers(0, 99), min_size=1)


@dataclass(frozen=True)
class Answer:
    """What the engine is to answer, and how it is split into tokens."""

    content: str
    reasoning: str = ""
    calls: tuple[tuple[str, dict], ...] = ()
    malformed: str = ""
    ended: bool = True
    by_byte: bool = False

    def text(self, family: Family) -> str:
        thought = f"<think>\n{self.reasoning}\n</think>\n\n" if self.reasoning else ""
        calls = family.write_calls(self.calls) if self.calls else ""
        return thought + self.content + calls + self.malformed


@st.composite
def answers(draw, family: Family) -> Answer:
    kind = draw(st.sampled_from(("text", "calls", "malformed")))
    most = 2 if family.several_calls else 1
    calls = st.lists(st.tuples(st.sampled_from(("add", "sub")), ARGUMENTS), min_size=1, max_size=most)
    bare = family is FAMILIES["llama3"]  # its calls have no text before them
    return Answer(
        content="" if kind != "text" and bare else draw(WORDS),
        reasoning=draw(st.sampled_from(("", "", "ab", "so\nc"))),
        calls=tuple(draw(calls)) if kind == "calls" else (),
        malformed=family.write_calls([("add", {"a": 1})])[:-4] if kind == "malformed" else "",
        ended=draw(st.booleans()),
        by_byte=draw(st.booleans()),
    )


def sampled(answer: Answer, family: Family, end: str) -> list[int]:
    """Tokenise an answer as the tokenizer does, or byte for byte, as no tokenizer would."""
    encode = family.tokenizer.encode
    tokens = encode(answer.text(family), add_special_tokens=False)
    if answer.by_byte:
        pieces = (family.tokenizer.decode([token]) for token in tokens)
        tokens = [
            token
            for piece, whole in zip(pieces, tokens, strict=True)
            for token in (encode(piece[0]) + encode(piece[1:]) if piece in ("ab", "abc", "er") else [whole])
        ]
    return [*tokens, *encode(end)] if answer.ended else tokens


def retold(message: dict, way: str, text: str | None) -> dict:
    """Repeat a message as clients do; `text` is all that the policy wrote, if it is an answer."""
    if way == "text" and text is not None:
        return {"role": "assistant", "content": text}
    if way == "without reasoning":
        return {key: value for key, value in message.items() if key != "reasoning_content"}
    if way == "otherwise":
        calls = [
            {**call, "function": {**call["function"], "arguments": otherwise(call["function"]["arguments"])}}
            for call in message.get("tool_calls", ())
        ]
        content = [{"type": "text", "text": message["content"]}] if message["content"] else None
        return {"refusal": None, **message, "content": content, **({"tool_calls": calls} if calls else {})}
    return message


def otherwise(arguments: str) -> str:
    return json.dumps(json.loads(arguments), indent=1, sort_keys=True)


@dataclass
class Chat:
    """A conversation of a policy with a scripted engine, and what its tokens should read like."""

    family: Family
    messages: list[dict] = field(default_factory=list)
    texts: list[str | None] = field(default_factory=list)
    expected: str = ""
    tokens: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = ScriptedEngine(lambda _: self.tokens[-1])
        stop = self.family.tokenizer.convert_tokens_to_ids(self.family.end)
        self.policy = Policy(self.engine, self.family.tokenizer, Sampling(stop_token_ids=(stop,)))

    async def turn(self, new: list[dict], answer: Answer, way: str = "same"):
        end = "<|observation|>" if not self.family.closing and answer.calls else self.family.end
        self.tokens.append(sampled(answer, self.family, end))
        self.say(new)
        told = [retold(m, way, text) for m, text in zip(self.messages, self.texts, strict=True)]
        completion = await self.policy.chat(told, tools=TOOLS)
        self.messages.append(completion.message)
        self.texts.append(completion.text)
        self.expected += answer.text(self.family) + (end if answer.ended else self.family.closing)
        self.open_ended = "" if answer.ended or not self.family.closing else self.family.closing
        self.ended_by = end if answer.ended else ""
        return completion

    def say(self, new: list[dict]) -> None:
        if self.messages:
            tail = self.family.tail(new)
            self.expected += tail if self.family.closing else tail.removeprefix(self.ended_by)
        else:
            self.expected = self.family.tokenizer.apply_chat_template(
                new, tools=TOOLS, tokenize=False, add_generation_prompt=True
            )
        self.messages += new
        self.texts += [None] * len(new)

    def read(self, tokens) -> str:
        return self.family.tokenizer.decode(tokens, skip_special_tokens=False)


UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)
"""Examples are small enough to be read as they are drawn; to shrink one takes minutes of event loops."""
WAYS = ("same", "same", "otherwise", "text", "without reasoning")


@pytest.mark.first(3, others=pytest.mark.slow)
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=6, phases=UNSHRUNK)
@given(data=st.data())
def test_no_token_is_lost_or_changed_between_turns(name, data):
    asyncio.run(whole_chat(FAMILIES[name], data))


async def whole_chat(family: Family, data) -> None:
    chat = Chat(family)
    new = [{"role": "user", "content": data.draw(WORDS)}]
    for _ in range(data.draw(st.integers(1, 4))):
        answer = data.draw(answers(family))
        completion = await chat.turn(new, answer, data.draw(st.sampled_from(WAYS)))
        assert [(call.name, call.parsed()) for call in completion.tool_calls] == list(answer.calls)
        assert bool(completion.malformed_calls) == bool(answer.malformed)
        assert (completion.reasoning or "") == answer.reasoning
        new = [
            {"role": "tool", "content": data.draw(WORDS), "tool_call_id": call.id}
            for call in completion.tool_calls
        ] or [{"role": "user", "content": data.draw(WORDS)}]
    [trajectory] = chat.policy.trajectories(0.0)
    unended = "" if answer.ended else family.closing  # what the template would write behind the last answer
    assert chat.read(trajectory.token_ids) == chat.expected.removesuffix(unended)
    spans = [trajectory.token_ids[turn.start : turn.stop].tolist() for turn in trajectory.turns]
    assert spans == chat.tokens
    assert trajectory.loss_mask.sum() == sum(map(len, chat.tokens))
