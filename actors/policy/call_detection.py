"""Finds the format in which a model writes tool calls: its template writes some, and a reader reads them."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from actors.episodes.task import JSON
from actors.policy.answers import AnswerReader
from actors.policy.tool_calls import CALL_FORMATS, format_shown
from bus.errors import ConfigError
from storage.chats.template import (
    PROBE_TOOL,
    QUESTION,
    QUESTION_TEXT,
    STAND_IN,
    ChatRefusedError,
    ChatTemplate,
    answer_with_calls,
)

TEXT = ': it\'s "so"\n \\d <b>, ü'
"""Text in which formats differ."""


@dataclass(frozen=True, slots=True)
class CallsFound:
    """How the calls of a model are read."""

    format: str
    """Name of the format."""
    unread: str = ""
    """Call that the template writes and that no format reads."""
    writes: bool = True
    """Whether the template writes calls at all."""

    def refuse_unread(self, setting: str = "actors.tool_calls") -> None:
        """Raise `ConfigError` for a template whose calls no format reads."""
        if self.unread:
            raise ConfigError(
                f"{setting}=auto: the chat template writes tool calls in a way that no format reads: "
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
