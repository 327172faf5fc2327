"""What a chat template writes behind an answer: the end of its turn, further messages, the next turn's begin.

A template may write the history otherwise than the policy did: without reasoning, or in another order. So an
answer in the history is not compared with its tokens. A stand-in of known text takes its place, and what the
template writes behind the stand-in goes behind the tokens."""

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import TypeAlias

from actors.episodes.task import JSON, ChatMessage
from actors.policy.messages import MessagesError, Tool

Render: TypeAlias = Callable[[Sequence[ChatMessage], Sequence[Tool]], str]
"""Renders messages up to where the assistant speaks. Raises `MessagesError`."""
QUESTION: ChatMessage = {"role": "user", "content": "."}
"""Stands for all that was said before the answer."""


class TailRenderer:
    """Renders what follows an answer, and nothing of what came before it."""

    def __init__(self, render: Render, special_texts: Sequence[str]) -> None:
        """Take special tokens as text: the first behind an answer's tool calls ends its turn."""
        self._render = render
        self._specials = special_texts
        self._stand_in = f"answer{uuid.uuid4().hex}"  # no message holds it by chance or design

    def tail(
        self, before: Sequence[ChatMessage], answer: ChatMessage, new: Sequence[ChatMessage],
        tools: Sequence[Tool],
    ) -> str | None:  # fmt: skip
        """Return the text behind `answer`, up to where the next one begins.

        None when the template does not tell: then the chat must be rendered as a whole."""
        first = takewhile(lambda message: message["role"] in ("system", "developer"), before)
        for beginning in ([*first, QUESTION], before):
            for stand_in in self._stand_ins(answer):
                try:
                    text = self._render([*beginning, stand_in, *new], tools)
                except MessagesError:  # the roles may have to alternate: the whole history is tried, too
                    continue
                tail = self._behind(text, in_call="tool_calls" in stand_in)
                in_place = bool(answer.get("tool_calls")) == ("tool_calls" in stand_in)
                if tail is not None and (in_place or self._follows([*before, answer, *new], tools, tail)):
                    return tail
        return None

    def _follows(self, chat: Sequence[ChatMessage], tools: Sequence[Tool], tail: str) -> bool:
        """Return whether the whole chat ends so: a tool's answer may be rendered only behind its call.

        A template that refuses the whole, such as one for single calls, has nothing better."""
        try:
            return self._render(chat, tools).endswith(tail)
        except MessagesError:
            return True

    def _stand_ins(self, answer: ChatMessage) -> Iterator[ChatMessage]:
        """Yield messages that end as `answer` does: with tool calls, or with text."""
        calls = answer.get("tool_calls")
        if isinstance(calls, Sequence) and calls and isinstance(last := calls[-1], Mapping):
            function = last["function"]
            name: JSON = function["name"] if isinstance(function, Mapping) else None
            call: JSON = {**last, "function": {"name": name, "arguments": {"value": self._stand_in}}}
            yield {"role": "assistant", "content": answer["content"], "tool_calls": [*calls[:-1], call]}
        yield {"role": "assistant", "content": self._stand_in}

    def _behind(self, text: str, *, in_call: bool) -> str | None:
        """Return what follows the stand-in's turn in `text`, its end included."""
        _, found, behind = text.rpartition(self._stand_in)
        if not found:
            return None
        if not in_call:
            return behind
        ends = [at for special in self._specials if (at := behind.find(special)) >= 0]
        return behind[min(ends) :] if ends else None
