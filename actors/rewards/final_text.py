"""Finds the final answer in a text: after the reasoning, and in the last box."""

import re

END_OF_REASONING = "</think>"
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def without_reasoning(text: str) -> str:
    """Return what follows the last end of reasoning; the whole text where there is none."""
    return text.rpartition(END_OF_REASONING)[2]


def last_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}` or `\\fbox{...}`; None if there is none that closes.

    Braces within it are balanced; escaped ones, as of a set, do not count."""
    boxes = list(_BOX.finditer(text))
    return _until_closed(text, boxes[-1].end()) if boxes else None


def _until_closed(text: str, begin: int) -> str | None:
    depth, place = 1, begin
    while place < len(text):
        character = text[place]
        if character == "\\":
            place += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[begin:place].strip()
        place += 1
    return None
