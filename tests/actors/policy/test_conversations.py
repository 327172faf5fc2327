"""A chat that goes on grows one trajectory, token for token, whatever a template would do to its history."""

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engines.base import Sampling
from actors.policy.policy import Policy
from benchmarks.scripted_engine import ScriptedEngine
from tests.actors.policy.families import FAMILIES, TOOLS, Family
from tests.actors.policy.retold_chats import UNSHRUNK, WORDS, Answer, answers, retold, sampled


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
