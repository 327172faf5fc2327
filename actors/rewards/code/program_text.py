"""The program in an answer, and whether what it printed is what was expected."""

import re
from decimal import Decimal, InvalidOperation

from actors.rewards.final_text import without_reasoning

_BLOCK = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n`]*\n(.*?)^[ \t]*\1[ \t]*$", re.DOTALL | re.MULTILINE)
LONGEST_NUMBER = 100
"""Characters of a number that is compared by its value."""


def program_in(text: str) -> str:
    """Return the last fenced block of code after the reasoning, or all that follows the reasoning."""
    rest = without_reasoning(text)
    blocks = _BLOCK.findall(rest)
    return str(blocks[-1][1]) if blocks else rest


def same_output(found: str, wanted: str) -> bool:
    """Return whether two outputs are equal line by line, but for spaces around words and blank last lines.

    Numbers are equal by value, as in LiveCodeBench (arXiv:2403.07974): 1.0 is 1."""
    ours, theirs = (text.rstrip().split("\n") for text in (found, wanted))
    if len(ours) != len(theirs):
        return False
    return all(map(_same_line, ours, theirs))


def _same_line(found: str, wanted: str) -> bool:
    ours, theirs = found.split(), wanted.split()
    return ours == theirs or (len(ours) == len(theirs) and all(map(_same_word, ours, theirs)))


def _same_word(found: str, wanted: str) -> bool:
    if found == wanted:
        return True
    if max(len(found), len(wanted)) > LONGEST_NUMBER:
        return False
    try:
        return Decimal(found) == Decimal(wanted)
    except InvalidOperation:
        return False
