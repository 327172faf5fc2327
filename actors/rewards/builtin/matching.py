"""Rewards that compare the text with the task's label: 1.0 or 0.0."""

import re
from decimal import Decimal, InvalidOperation

from actors.episodes.task import Answer
from actors.rewards.base import RewardError, label_of, without_working

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def exact(answer: Answer) -> float:
    """Score 1 for an answer that is the label and nothing else, and that the policy ended by itself."""
    wanted = label_of(answer).strip()
    return float(answer.finish_reason == "stop" and answer.text.strip() == wanted)


def last_number(answer: Answer) -> float:
    """Score 1 when the last number in the text equals the label as a number: 1,200.50 is 1200.5.

    Of a label such as GSM8K's, only what follows its last `####` counts."""
    wanted, numbers = _label_number(answer), NUMBER.findall(answer.text)
    return float(bool(numbers) and _number(numbers[-1]) == wanted)


def final_answer(answer: Answer) -> float:
    """Score 1 when the text after the last `=` equals the label's and the policy ended the answer itself."""
    wanted, found = (text.rpartition("=")[2].strip() for text in (label_of(answer), answer.text))
    return float(answer.finish_reason == "stop" and found == wanted)


def contains(answer: Answer) -> float:
    """Score 1 when the label occurs in the text."""
    return float(label_of(answer) in answer.text)


def _label_number(answer: Answer) -> Decimal:
    label = label_of(answer)
    try:
        number = _number(without_working(label))
    except InvalidOperation:
        number = Decimal("nan")
    if not number.is_finite():
        raise RewardError(
            f"task {answer.task_id}: the label {label[-200:]!r} is not a number, as last_number needs: "
            "give a number, or GSM8K's form `... #### 72`"
        )
    return number


def _number(text: str) -> Decimal:
    return Decimal(text.strip().replace(",", ""))


def sandbox_check(answer: Answer) -> float:
    """Return what the check of the settings gives for what the answer's episode left, 1 where it passes."""
    given = answer.metadata.get("sandbox_check")
    return float(given) if isinstance(given, int | float) else 0.0
