"""Answers that consist of messages with a header each, as gpt-oss (harmony) and its like write them.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>
"""

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

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
