"""Reads an answer: reasoning first, then tool calls; nothing inside reasoning is a call."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from actors.policy.call_readers import Schemas
from actors.policy.messages import Tool, ToolCall
from actors.policy.reading import DECODER, NOT_READ, Found, WrittenCall, parameters_of
from actors.policy.tool_calls import CALL_FORMATS, CallFormat, format_shown

FRAME = re.compile(
    r"(?:<\|start\|>\s*assistant)?(?P<header>(?:[^<]|<\|channel\|>|<\|constrain\|>)*?)<\|message\|>"
    r"(?P<body>.*?)(?:<\|(?:end|call|return|eom|eot)\|>|(?=<\|start\|>)|$)",
    re.DOTALL,
)
RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
MARKS = re.compile(r"<\|(?:start|channel|constrain|message|end|call|return|eom|eot)\|>")


class Frame(NamedTuple):
    """One message of an answer."""

    kind: Literal["reasoning", "content", "call"]
    body: str
    recipient: str = ""
    """Name of the tool that a call is to."""


def frames(text: str) -> Iterator[Frame]:
    """Return the messages of an answer in order; what stands outside of any is content."""
    at = 0
    for found in FRAME.finditer(text):
        if outside := MARKS.sub("", text[at : found.start()]):
            yield Frame("content", outside)
        yield _frame(found["header"], found["body"])
        at = found.end()
    if rest := MARKS.sub("", text[at:]):
        yield Frame("content", rest)


def _frame(header: str, body: str) -> Frame:
    to = RECIPIENT.search(header)
    recipient = to[1] if to else "user"
    if recipient not in ("user", "self", "assistant", "all"):
        return Frame("call", body, recipient)
    return Frame("reasoning" if recipient == "self" or "analysis" in header else "content", body)


REASONING = (
    ("[THINK]", "[/THINK]"), ("<|START_THINKING|>", "<|END_THINKING|>"), ("<|channel>thought", "<channel|>"),
    ("<seed:think>", "</seed:think>"), ("<think>", "</think>"),
)  # fmt: skip
"""Marks around reasoning; a template that shows none of the others has the last."""
CHANNEL = "<|channel>"
"""The token with which a mark of Gemma's begins."""


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer, taken apart."""

    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    malformed_calls: tuple[str, ...]


@dataclass(slots=True)
class _Parts:
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[WrittenCall] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)

    @property
    def is_blank(self) -> bool:
        return not any(map(str.strip, self.content))

    def take(self, found: Found) -> int:
        """Note what a reader found; return where the text goes on."""
        self.calls.extend(found.calls)
        if found.malformed:
            self.malformed.append(found.malformed.strip())
        return found.end


class AnswerReader:
    """Takes answers apart in the way that a chat template's model writes them."""

    def __init__(self, template: str, tool_calls: str = "auto") -> None:
        """Read tool calls in the format of that name; "auto" tells it from the template's text."""
        named = format_shown(template) if tool_calls == "auto" else tool_calls
        self._calls: CallFormat = CALL_FORMATS[named]
        shown = [marks for marks in REASONING if marks[0] in template]
        self._think, self._thought = shown[0] if shown else REASONING[-1]
        self._openings = re.compile("|".join(map(re.escape, (self._think, *self._calls.openings))))
        self._thinking = re.compile(re.escape(self._think))

    @property
    def marks(self) -> frozenset[str]:
        """Return the texts that have a meaning here: special tokens of these texts must not be left out."""
        own = (CHANNEL,) if self._think.startswith(CHANNEL) else ()
        return frozenset((self._think, self._thought, *own, *self._calls.openings, *self._calls.marks))

    @property
    def ends(self) -> frozenset[str]:
        return frozenset(self._calls.ends)

    def opens_reasoning(self, rendered: str) -> bool:
        """Return whether a rendered prompt ends inside of reasoning, so that the answer begins there."""
        return rendered.rstrip().endswith(self._think)

    def read(self, text: str, *, in_reasoning: bool, tools: Sequence[Tool], number: int) -> ParsedAnswer:
        """Take `text` apart. Calls are looked for only if there are tools. Reasoning that does not end takes
        all that follows. `number` is that of the completion: it makes the ids of calls unique in a rollout,
        in nine letters and digits, as Mistral's template wants them."""
        parts, at = _Parts(), 0
        if self._calls.framed:
            return self._read_frames(text, tools, number)
        if in_reasoning:
            at = self._read_reasoning(text, 0, parts)
        openings = self._openings if tools else self._thinking
        schemas = parameters_of(tools)
        while at < len(text):
            if tools and parts.is_blank and text[at:].lstrip().startswith(self._calls.bare):
                found = self._calls.read(text, at, schemas)
                if found.end > at:
                    at = parts.take(found)
                    continue
            opening = openings.search(text, at)
            parts.content.append(text[at : opening.start() if opening else len(text)])
            if opening is None:
                break
            if opening[0] == self._think:
                at = self._read_reasoning(text, opening.end(), parts)
            else:
                at = parts.take(self._calls.read(text, opening.start(), schemas))
        return _answer(parts, text, number)

    def _read_frames(self, text: str, tools: Sequence[Tool], number: int) -> ParsedAnswer:
        """Take an answer apart that consists of messages; those to tools are calls."""
        parts, schemas = _Parts(), parameters_of(tools)
        for frame in frames(text):
            if frame.kind == "reasoning":
                parts.reasoning.append(frame.body)
            elif frame.kind == "content" or not tools:
                parts.content.append(frame.body)
            else:
                self._read_call(frame, schemas, parts)
        return _answer(parts, text, number)

    def _read_call(self, frame: Frame, schemas: Schemas, parts: _Parts) -> None:
        """Note the call in a message to a tool: its arguments as JSON, or calls that name the tool again."""
        at = 0
        try:
            DECODER.decode(frame.body)
            parts.calls.append(WrittenCall(frame.recipient, frame.body.strip()))
        except NOT_READ:
            while at < len(frame.body):
                at = parts.take(self._calls.read(frame.body, at, schemas))

    def _read_reasoning(self, text: str, at: int, parts: _Parts) -> int:
        """Note the reasoning that began before `at`; return where the text goes on."""
        end = text.find(self._thought, at)
        parts.reasoning.append(text[at : end if end >= 0 else len(text)])
        return end + len(self._thought) if end >= 0 else len(text)


def _answer(parts: _Parts, text: str, number: int) -> ParsedAnswer:
    content = "".join(parts.content)
    reasoning = "\n".join(part.strip() for part in parts.reasoning if part.strip())
    calls = (
        ToolCall(f"{number % 16**6:06x}{index % 16**3:03x}", call.name, call.arguments)
        for index, call in enumerate(parts.calls)
    )
    return ParsedAnswer(
        content if content == text else content.strip(),
        reasoning or None,
        tuple(calls),
        tuple(parts.malformed),
    )
