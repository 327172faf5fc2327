"""The program in an answer, and whether what it printed is what was expected."""

import re
from decimal import Decimal, InvalidOperation

from actors.rewards.final_text import without_reasoning

_FENCE = re.compile(r"(`{3,})[^`]*+|(~{3,}).*+")
LONGEST_NUMBER = 100
"""Characters of a number that is compared by its value."""


def program_in(text: str) -> str:
    """Return the last fenced block of code after the reasoning, or all that follows the reasoning."""
    rest = without_reasoning(text)
    found, lines, fence = None, list[str](), ""
    for line in rest.split("\n"):
        mark = line.strip()
        if not fence:
            opens = _FENCE.fullmatch(mark)
            fence, lines = (opens[1] or opens[2], []) if opens else ("", lines)
        elif mark.startswith(fence) and not mark.strip(fence[0]):
            found, fence = lines, ""
        else:
            lines.append(line)
    return rest if found is None else "\n".join(found)


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
