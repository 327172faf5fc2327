"""What is short is rendered, encoded and read at once; what is long, in a thread, and never both together."""

import asyncio
import threading

import numpy as np
import pytest

from actors.policy.chat_format import SHORT_CHARACTERS, SHORT_TOKENS, ChatFormat
from actors.policy.messages import MessagesError
from benchmarks.actors import Characters
from tests.actors.policy.families import TOOLS

WAIT_S = 20.0


class Watched(Characters):
    """Notes whether it is used on the thread of the event loop, and can have an encoding wait."""

    def __init__(self) -> None:
        self.at_once: list[bool] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.using = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.note()
        return super().encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        self.note()
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    def note(self) -> None:
        self.using += 1
        assert self.using == 1, "two threads use it"
        self.at_once.append(threading.current_thread() is threading.main_thread())
        assert self.may_go_on.wait(WAIT_S)
        self.using -= 1


def user(text: object) -> dict[str, object]:
    return {"role": "user", "content": text}


@pytest.fixture
def watched():
    tokenizer = Watched()
    return ChatFormat(tokenizer), tokenizer


@pytest.mark.parametrize(
    ("messages", "tools", "at_once"),
    [
        ([user("short")], None, True),
        ([user("short"), user("x" * (SHORT_CHARACTERS - 20))], None, True),
        ([user("x" * (SHORT_CHARACTERS // 2 + 1))] * 2, None, False),
        ([user([{"type": "text", "text": "a part"}])], None, False),
        ([user("short")], TOOLS, False),
    ],
)
async def test_short_chats_are_encoded_at_once_and_others_in_the_thread(watched, messages, tools, at_once):
    chats, tokenizer = watched
    await chats.context(messages, tools, ())
    assert tokenizer.at_once == [at_once]


@pytest.mark.parametrize("messages", [["no message"], [user(None), 3], [{}]])
async def test_what_is_no_chat_is_refused_wherever_it_is_read(watched, messages):
    with pytest.raises(MessagesError):
        await watched[0].context(messages, None, ())


@pytest.mark.parametrize(("tokens", "at_once"), [(SHORT_TOKENS, True), (SHORT_TOKENS + 1, False)])
async def test_short_answers_are_read_at_once_and_others_in_the_thread(watched, tokens, at_once):
    chats, tokenizer = watched
    token_ids = np.full(tokens, ord("x"), np.int32)
    text, answer = await chats.read(token_ids, in_reasoning=False, tools=None, number=0)
    assert (text, answer.content, tokenizer.at_once) == ("x" * tokens, "x" * tokens, [at_once])


async def test_what_is_short_does_not_use_the_tokenizer_beside_the_thread(watched):
    chats, tokenizer = watched
    tokenizer.may_go_on.clear()
    long = asyncio.create_task(chats.context([user("x" * SHORT_CHARACTERS)], None, ()))
    async with asyncio.timeout(WAIT_S):
        while not tokenizer.using:  # noqa: ASYNC110 - the thread has no event for the loop
            await asyncio.sleep(0.001)
    short = asyncio.create_task(chats.context([user("short")], None, ()))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not short.done(), "and the event loop goes on"
    tokenizer.may_go_on.set()
    contexts = await asyncio.wait_for(asyncio.gather(long, short), WAIT_S)
    assert [len(one.added) for one in contexts] == [SHORT_CHARACTERS, len("short")]
    assert tokenizer.at_once == [False, False]
