"""Chats as tokens and back: the template renders, the tokenizer encodes, in a thread of their own."""

import asyncio
import json
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import count, takewhile
from typing import ParamSpec, Protocol, TypeAlias, TypeVar

import numpy as np
import structlog

from actors.episodes.task import JSON, ChatMessage, FixedMessages
from actors.policy.answers import AnswerReader, ParsedAnswer
from actors.policy.chat_messages import checked_messages, checked_tools, digest
from actors.policy.conversation import Boundary, Conversation, ReadChat, continued, read_chat
from actors.policy.messages import MessagesError, Tool, tool_name
from actors.policy.shown_images import ShownImages, without_data
from actors.policy.tool_calls import CALL_FORMATS, format_shown
from bus.errors import ConfigError
from bus.images import PlacedImage
from storage.chats.stop_tokens import RendersTokens, TurnEnds, turn_ends
from storage.chats.template import (
    PROBE_TOOL,
    QUESTION,
    QUESTION_TEXT,
    STAND_IN,
    ChatRefusedError,
    ChatTemplate,
    answer_with_calls,
)
from storage.images.chat import ImageChat

TEXT = ': it\'s "so"\n \\d <b>, ü'


@dataclass(frozen=True, slots=True)
class CallsFound:
    """How the calls of a model are read."""

    format: str
    unread: str = ""
    """Call that the template writes and that no format reads."""
    writes: bool = True

    def refuse_unread(self) -> None:
        """Raise `ConfigError` for a template whose calls no format reads."""
        if self.unread:
            raise ConfigError(
                "actors.tool_calls=auto: the chat template writes tool calls in a way that no format reads: "
                f"{self.unread!r}; name the format in which the model writes them "
                f"({', '.join(CALL_FORMATS)}), "
                'take a template that writes one of them, or set actors.environment.calls = "tags"'
            )


def calls_found(template: ChatTemplate, specials: Iterable[str], named: str = "auto") -> CallsFound:
    """Return the format by which calls are read: that of the name, or the one that reads what the template
    writes. Where the template writes no calls, its text tells."""
    if named != "auto":
        return CallsFound(named)
    answers = [text for text in (_written(template, calls) for calls in (2, 1)) if STAND_IN in text]
    for text in answers:
        for name in CALL_FORMATS:
            if _reads(name, template.text, text, list(specials)):
                return CallsFound(name)
    shown = format_shown(template.text)
    return CallsFound(shown, unread=answers[-1].strip() if answers else "", writes=bool(answers))


def _written(template: ChatTemplate, calls: int) -> str:
    """Return what the template writes for an answer of calls behind the question; nothing if it refuses."""
    chat = [QUESTION, answer_with_calls(calls, TEXT, number=3, on=True)]
    try:
        begun = template.render([QUESTION], [PROBE_TOOL])
        text = template.render(chat, [PROBE_TOOL], go_on=False)
    except ChatRefusedError:
        return ""
    return text.removeprefix(begun) if text.startswith(begun) else text.rpartition(QUESTION_TEXT)[2]


def _reads(name: str, template: str, text: str, specials: Sequence[str]) -> bool:
    """Tell whether a format reads the calls in what the template wrote, all special tokens left out that have
    no meaning for it."""
    reader = AnswerReader(template, name)
    left_out = sorted({*specials} - reader.marks - reader.ends, key=len, reverse=True)
    if left_out:
        text = re.sub("|".join(map(re.escape, left_out)), "", text)
    answer = reader.read(text, in_reasoning=False, tools=[PROBE_TOOL], number=0)
    if not answer.tool_calls or answer.malformed_calls or STAND_IN in answer.content:
        return False
    expected = ({"value": f"{STAND_IN}{n}{TEXT}", "number": 3, "on": True} for n in count())
    return all(
        call.name == "probe" and _parsed(call.arguments) == arguments
        for call, arguments in zip(answer.tool_calls, expected, strict=False)
    )


def _parsed(arguments: str) -> JSON:
    try:
        read: JSON = json.loads(arguments)
    except ValueError:
        return None
    return read


Render: TypeAlias = Callable[[Sequence[ChatMessage], Sequence[Tool]], str]
"""Renders messages up to where the assistant speaks. Raises `MessagesError`."""
ANY_QUESTION: ChatMessage = {"role": "user", "content": "."}
"""Stands for all that was said before the answer."""


class TailRenderer:
    """Renders what a chat template writes behind an answer: the end of its turn, further messages, and the
    begin of the next turn.

    A template may write the history otherwise than the policy did: without reasoning, or in another order.
    So an answer in the history is not compared with its tokens. A stand-in of known text takes its place, and
    what the template writes behind the stand-in goes behind the tokens."""

    def __init__(self, render: Render, special_texts: Sequence[str]) -> None:
        """Take special tokens as text: the first behind an answer's tool calls ends its turn."""
        self._render = render
        self._specials = special_texts
        self._stand_in = f"answer{uuid.uuid4().hex}"  # no message holds it by chance or design

    def tail(
        self, before: Sequence[ChatMessage], answer: ChatMessage, new: Sequence[ChatMessage],
        tools: Sequence[Tool],
    ) -> str | None:  # fmt: skip
        """Return the text behind `answer`, up to where the next one begins. None when the template does not
        tell: then the chat must be rendered as a whole."""
        first = takewhile(lambda message: message["role"] in ("system", "developer"), before)
        for beginning in ([*first, ANY_QUESTION], before):
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
        """Return whether the whole chat ends so: a tool's answer may be rendered only behind its call. A
        template that refuses the whole, such as one for single calls, has nothing better."""
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


log = structlog.get_logger()
P = ParamSpec("P")
T = TypeVar("T")
PROMPTS_REMEMBERED = 512
SHORT_CHARACTERS = 4000
"""Characters of a chat that is rendered and encoded at once: a thread takes longer to be asked."""
SHORT_TOKENS = 256
"""Tokens of an answer that is read at once."""


class Tokenizer(RendersTokens, Protocol):
    """The part of a transformers tokenizer that is used here."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Turn text into token ids."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Turn token ids into text."""


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """The context of a completion: the beginning of a strand, and what follows."""

    strand: int | None
    """Number of the strand whose tokens it begins with; None where it is rendered as a whole."""
    kept: int
    added: np.ndarray
    """int32 [N], the tokens that follow."""
    in_reasoning: bool
    """The answer begins inside of reasoning."""
    conversation: Conversation
    """What the completion repeats of the strand."""
    chat: ReadChat
    images: tuple[PlacedImage, ...]
    """Images among the tokens that follow, of which the first is token `kept`."""


@dataclass(frozen=True, slots=True, eq=False)
class _Prompt:
    token_ids: np.ndarray
    in_reasoning: bool
    images: tuple[PlacedImage, ...]
    """Images among its tokens, without their bytes."""


class ChatFormat:
    """A tokenizer and its chat template. Only one thread at a time renders and encodes, for what is long one
    beside the event loop: a group's prompt is encoded once, however many siblings ask for it at the same
    time. Of a chat that goes on, only the tail is rendered and encoded."""

    def __init__(
        self, tokenizer: Tokenizer, tool_calls: str = "auto", images: ImageChat | None = None
    ) -> None:
        """Read tool calls in that format; "auto" tells it from the chat template. `images` are those of the
        model; without, it sees none."""
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._images = images
        self._named = tool_calls
        self._thread = ThreadPoolExecutor(1, "chat-format")
        self._in_use = threading.Lock()
        """Held while the tokenizer is used: one of transformers raises where two threads use it."""
        self._prompts: dict[bytes, _Prompt] = {}
        self._tools_unseen = False

    @cached_property
    def calls(self) -> CallsFound:
        """How the model writes tool calls, as its template shows or as it was named."""
        return calls_found(self._template, self._special_texts.values(), self._named)

    @cached_property
    def _reader(self) -> AnswerReader:
        return AnswerReader(self._template.text, self.calls.format)

    def encode_chat(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None = None
    ) -> tuple[int, ...]:
        """Return the tokens of a chat up to where the assistant starts to speak. Raises `MessagesError`."""
        return self.prompt(messages, tools)[0]

    def prompt(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None = None
    ) -> tuple[tuple[int, ...], tuple[PlacedImage, ...]]:
        """Return what `encode_chat` does, and the images among the tokens. Raises `MessagesError`."""
        shown = ShownImages(self._images)
        prompt = self._prompt(checked_messages(messages, shown), checked_tools(tools, shown), shown)
        return tuple(prompt.token_ids.tolist()), shown.with_data(prompt.images)

    def render_chat(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None = None
    ) -> tuple[str, bool]:
        """Return the text of a chat up to where the assistant starts to speak, and whether it starts inside
        of reasoning. Raises `MessagesError`."""
        text = self._render(checked_messages(messages), checked_tools(tools))
        return text, self._reader.opens_reasoning(text)

    def read_text(
        self, text: str, *, in_reasoning: bool, tools: Sequence[Tool] | None, number: int
    ) -> ParsedAnswer:
        """Return what an answer consists of, of which only the text is known."""
        return self._reader.read(text, in_reasoning=in_reasoning, tools=tools or (), number=number)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of rendered text, which spells out its special tokens: none is added. Half a
        surrogate pair has no UTF-8 and becomes U+FFFD."""
        if not text.isascii():
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    async def context(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None,
        conversations: Sequence[tuple[int, Conversation]],
    ) -> Context:  # fmt: skip
        """Return a chat as the context of a completion. Raises `MessagesError`."""
        kept = messages if isinstance(messages, FixedMessages) else list(messages)
        at_once = not tools and _is_short(kept)
        return await self._soon(at_once, self._context, kept, tools, conversations)

    async def read(
        self, token_ids: np.ndarray, *, in_reasoning: bool, tools: Sequence[Tool] | None, number: int
    ) -> tuple[str, ParsedAnswer]:
        at_once = len(token_ids) <= SHORT_TOKENS
        return await self._soon(at_once, self._read, token_ids.tolist(), in_reasoning, tools or (), number)

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` where all that may take long runs."""

        def alone() -> T:
            with self._in_use:
                return function(*args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._thread, alone)

    async def _soon(self, at_once: bool, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` here where it is to be run `at_once` and the thread is idle; else in the thread."""
        if not (at_once and self._in_use.acquire(blocking=False)):
            return await self.in_thread(function, *args, **kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            self._in_use.release()

    def closed_by(self, token_ids: np.ndarray, stop_token_ids: Sequence[int]) -> int | None:
        """Return the token by which the policy ended its answer; None where something else ended it."""
        last = int(token_ids[-1]) if len(token_ids) else None
        return last if last in self._special_ids or last in stop_token_ids else None

    def _context(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None,
        conversations: Sequence[tuple[int, Conversation]],
    ) -> Context:  # fmt: skip
        shown = ShownImages(self._images)
        # images have to be read again: their bytes are wanted in each turn
        earlier = () if self._images else (conversation.chat for _, conversation in conversations)
        chat, offered = read_chat(messages, shown, earlier), checked_tools(tools, shown)
        checked, named = chat.checked, digest(offered)
        if found := continued(chat.prints, named, conversations):
            number, part = found
            repeated, boundary = len(part.messages), part.boundaries[-1]
            tail = self._tails.tail(checked[: repeated - 1], boundary.answer, checked[repeated:], offered)
            if tail is not None:
                kept, behind = self._joined(self.encode(tail), boundary)
                added, images = shown.expanded(behind, checked[repeated:])
                opens = self._reader.opens_reasoning(tail)
                tokens = np.array(added, np.int32)
                return Context(number, kept, tokens, opens, part, chat, images)
        prompt = self._prompt(checked, offered, shown)
        images = shown.with_data(prompt.images)
        return Context(None, 0, prompt.token_ids, prompt.in_reasoning, Conversation(named), chat, images)

    def _joined(self, tail: list[int], boundary: Boundary) -> tuple[int, list[int]]:
        """Return how many tokens of the strand are kept, and those that follow them.

        A policy may have ended its answer by another token than the template does, such as <|eom_id|>, which
        then stands in place of the template's. But where the template itself ends the last answer of a chat
        otherwise than those before, as gpt-oss does with <|return|>, the history has what it has there."""
        ends, closed_by = self._ends, boundary.closed_by
        if closed_by is not None and closed_by == ends.last != ends.history and tail[:1] == [ends.history]:
            return boundary.tokens - 1, tail
        ended = 0 if closed_by is None else self._through_end(tail, (closed_by, ends.history))
        return boundary.tokens, tail[ended:]

    def _through_end(self, tail: list[int], marks: tuple[int | None, ...]) -> int:
        """Return how many tokens of a tail end the turn: a mark, and the space that templates such as that of
        Apriel write before it. 0 where the tail does not begin so."""
        for number, token in enumerate(tail, 1):
            if token in marks:
                return number
            if not self.decode([token], skip_special_tokens=False).isspace():
                break
        return 0

    def _prompt(self, messages: Sequence[ChatMessage], tools: Sequence[Tool], shown: ShownImages) -> _Prompt:
        key = digest([messages, tools])
        prompt = self._prompts.pop(key, None)
        if prompt is None:
            text = self._render(messages, tools)
            self._look_for_tools(text, tools)
            tokens, images = shown.expanded(self.encode(text), messages)
            opens = self._reader.opens_reasoning(text)
            prompt = _Prompt(np.array(tokens, np.int32), opens, without_data(images))
            if len(self._prompts) >= PROMPTS_REMEMBERED:
                del self._prompts[next(iter(self._prompts))]
        self._prompts[key] = prompt  # the last prompt is the last one used
        return prompt

    def _render(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> str:
        try:
            return self._template.render(messages, tools)
        except ChatRefusedError as error:
            raise MessagesError(f"the chat template refuses these messages: {error}") from error

    def _look_for_tools(self, text: str, tools: Sequence[Tool]) -> None:
        """Warn once of a template that does not show the tools to the policy."""
        if not self._tools_unseen and any(name not in text for name in map(tool_name, tools)):
            self._tools_unseen = True
            log.warning("tools_not_in_prompt", remedy="describe them in a message, or use another template")

    def _read(
        self, token_ids: list[int], in_reasoning: bool, tools: Sequence[Tool], number: int
    ) -> tuple[str, ParsedAnswer]:
        text = written = self.decode(token_ids)
        if self._kept_marks.intersection(token_ids):
            left_out = self._special_ids - self._kept_marks
            kept = [token for token in token_ids if token not in left_out]
            written = self.decode(kept, skip_special_tokens=False)
        return text, self._reader.read(written, in_reasoning=in_reasoning, tools=tools, number=number)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(
            number for number, token in self._tokenizer.added_tokens_decoder.items() if token.special
        )

    @cached_property
    def _special_texts(self) -> dict[int, str]:
        return {
            number: self.decode([number], skip_special_tokens=False).strip() for number in self._special_ids
        }

    @cached_property
    def _kept_marks(self) -> frozenset[int]:
        """Return the special tokens that have a meaning in an answer."""
        return self._numbers_of(self._reader.marks | self._reader.ends)

    def _numbers_of(self, texts: Set[str]) -> frozenset[int]:
        return frozenset(number for number, text in self._special_texts.items() if text in texts)

    @cached_property
    def _tails(self) -> TailRenderer:
        ends = self._special_ids - self._numbers_of(self._reader.marks)
        texts = [self.decode([number], skip_special_tokens=False) for number in ends]
        return TailRenderer(self._render, texts)

    @cached_property
    def _ends(self) -> TurnEnds:
        return turn_ends(self._tokenizer)


def _is_short(messages: Sequence[ChatMessage]) -> bool:
    """Return whether a chat is of few characters, and of texts alone; what is no message is not short."""
    left = SHORT_CHARACTERS
    for message in messages:
        for text in message.values() if isinstance(message, dict) else (None,):
            left -= len(text) if isinstance(text, str) else SHORT_CHARACTERS + 1
        if left < 0:
            return False
    return True
