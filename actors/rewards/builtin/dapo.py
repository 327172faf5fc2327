"""Reward of DAPO's data set (arXiv:2503.14476), whose answers are whole numbers: 1 or -1."""

import re
from decimal import Decimal, InvalidOperation

from actors.episodes.task import Answer
from actors.rewards.base import RewardError, Scored, label_of, without_working

LAST_CHARACTERS = 300
"""Characters at the end of a text in which its answer is looked for."""
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_WRAPPED = re.compile(r"\\(?:boxed|fbox|text|textbf|mathrm|mathbf|overline|mbox)\s*\{([^{}]*)\}")
_DROPPED = re.compile(r"\\[!;, ]|\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\?%|[\s*$\"]")
_UNIT = re.compile(r"(?<=\d)[a-zA-Z]+$")
_GROUPED = re.compile(r"-?\d{1,3}(?:(?:,|\{,\})\d{3})+")


def dapo(answer: Answer) -> Scored:
    """Score 1 if the last `Answer: ...` in the last 300 characters is the label, a whole number; else -1.

    What surrounds the number (`$`, boxes, spaces, separators of thousands, a unit, a full stop, an equation's
    left side) does not count. The part `accuracy` is 1 or 0."""
    label, found = str(_whole_label(answer)), _ANSWER.findall(answer.text[-LAST_CHARACTERS:])
    correct = bool(found) and _normalised(found[-1]) == label
    return Scored(1.0 if correct else -1.0, {"accuracy": float(correct)})


def _whole_label(answer: Answer) -> int:
    """Return the label, cut to a whole number. Raises RewardError for one that is none."""
    label = _normalised(without_working(label_of(answer)))
    try:
        return int(Decimal(label))
    except (InvalidOperation, ValueError, OverflowError) as error:
        raise RewardError(
            f"task {answer.task_id}: the label {answer.label!r} is not a number, as the reward dapo needs"
        ) from error


def _normalised(text: str) -> str:
    while (unwrapped := _WRAPPED.sub(r"\1", text)) != text:
        text = unwrapped
    text = _DROPPED.sub("", text).rpartition("=")[2].rstrip(".,;")
    if _GROUPED.fullmatch(text):
        text = text.replace("{,}", "").replace(",", "")
    return _UNIT.sub("", text)
