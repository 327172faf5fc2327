"""Rewards of mathematical answers: 1.0 or 0.0, equal as expressions and not only as text."""

import re

from actors.episodes.task import Answer
from actors.rewards.answer_faults import verified
from actors.rewards.base import RewardError, label_of, without_working
from actors.rewards.builtin import math_equality
from actors.rewards.builtin.verifier_processes import VerifierProcesses
from actors.rewards.final_text import END_OF_REASONING, last_boxed
from actors.settings.rewards import RewardConfig

LONGEST = 2000
"""Characters of an expression that is compared; a longer one equals nothing."""
RESPONSE_MARK = "###Response"
_WHOLE = re.compile(r"[+-]?\d+")
_TEXT_ONLY = str.maketrans("", "", " \t\n$")


class MathAnswer:
    """Compares the last boxed expression of a text with the label, by math-verify."""

    def __init__(self, config: RewardConfig) -> None:
        self._verifiers = VerifierProcesses(
            processes=config.math_processes,
            timeout_s=config.math_timeout_s,
            module="math_verify",
            prepare=math_equality.prepare,
        )

    async def __call__(self, answer: Answer) -> float:
        """Score 1 if the last `\\boxed{...}` equals the label, whose own box does not count.

        A label without a box counts whole, or after the last `####` as GSM8K's. An expression scores 0 by an
        `AnswerFaultError` that makes the comparison fail or take too long, where the label does not."""
        return await self._score(answer, answer.text)

    async def _score(self, answer: Answer, text: str) -> float:
        wanted, found = wanted_expression(answer), last_boxed(text)
        if found is None or len(found) > LONGEST:
            return 0.0
        if (same := quickly_equal(wanted, found)) is not None:
            return float(same)
        return float(await self._equal(answer, wanted, found))

    async def _equal(self, answer: Answer, wanted: str, found: str) -> bool:
        async def same(text: str) -> float:
            return float(await self._verifiers.call(math_equality.equal, wanted, text))

        where = f"task {answer.task_id}: the comparison of {found[:100]!r} with the label {wanted[:100]!r}"
        return bool(await verified(same, found, control=wanted, lowest=0.0, where=where))

    async def close(self) -> None:
        await self._verifiers.close()


class DeepScaleR(MathAnswer):
    """Grades as DeepScaleR does: only what follows the reasoning counts, an answer without it is wrong."""

    async def __call__(self, answer: Answer) -> float:
        """Score 1 if the last `\\boxed{...}` after `</think>` or `###Response` equals the label."""
        for mark in (END_OF_REASONING, RESPONSE_MARK):
            if mark in answer.text:
                return await self._score(answer, answer.text.rpartition(mark)[2])
        wanted_expression(answer)
        return 0.0


def wanted_expression(answer: Answer) -> str:
    """Return the expression in a task's label. Raises RewardError for a task without one."""
    label = label_of(answer)
    boxed = last_boxed(label)
    wanted = without_working(label) if boxed is None else boxed
    if not wanted:
        raise RewardError(
            f"task {answer.task_id}: its label {label[-200:]!r} holds no expression: give it one"
        )
    return wanted


def quickly_equal(wanted: str, found: str) -> bool | None:
    """Return whether two expressions are equal where their text tells; None where it does not."""
    wanted, found = wanted.translate(_TEXT_ONLY), found.translate(_TEXT_ONLY)
    if wanted == found:
        return True
    if _WHOLE.fullmatch(wanted) and _WHOLE.fullmatch(found):
        return _same_whole(wanted, found)
    return None


def _same_whole(wanted: str, found: str) -> bool:
    """Compare whole numbers as text: int() refuses thousands of digits."""
    signs = [text.startswith("-") for text in (wanted, found)]
    digits = [text.lstrip("+-").lstrip("0") for text in (wanted, found)]
    return digits[0] == digits[1] and (signs[0] == signs[1] or digits[0] == "")
