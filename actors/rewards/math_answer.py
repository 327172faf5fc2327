"""Rewards of mathematical answers: 1.0 or 0.0, equal as expressions and not only as text."""

import asyncio
import multiprocessing
import re

from pebble import ProcessPool

from actors.rewards.base import Answer, RewardError, label_of
from actors.rewards.config import RewardConfig
from actors.rewards.final_text import END_OF_REASONING, last_boxed

LONGEST = 2000
"""Characters of an expression that is compared; a longer one equals nothing."""
RESPONSE_MARK = "###Response"
_WHOLE = re.compile(r"[+-]?\d+")
_TEXT_ONLY = str.maketrans("", "", " \t\n$")


class MathAnswer:
    """Compares the last boxed expression of a text with the label, by math-verify."""

    def __init__(self, config: RewardConfig) -> None:
        self._processes = config.math_processes
        self._timeout_s = config.math_timeout_s
        self._pool: ProcessPool | None = None

    async def __call__(self, answer: Answer) -> float:
        """Score 1 if the last `\\boxed{...}` equals the label, whose own box does not count.

        Raises RewardError for a comparison that takes too long, which says nothing about the answer."""
        return await self._score(answer, answer.text)

    async def _score(self, answer: Answer, text: str) -> float:
        label, found = label_of(answer), last_boxed(text)
        boxed = last_boxed(label)
        wanted = label.strip() if boxed is None else boxed
        if not wanted:
            raise RewardError(f"task {answer.task_id}: its label is empty")
        if found is None or len(found) > LONGEST:
            return 0.0
        if (same := quickly_equal(wanted, found)) is not None:
            return float(same)
        return float(await self._equal(answer, wanted, found))

    async def _equal(self, answer: Answer, wanted: str, found: str) -> bool:
        from actors.rewards.math_equality import equal  # sympy takes a second: only who needs it pays

        comparison = self._started().schedule(equal, args=(wanted, found), timeout=self._timeout_s)
        try:
            return bool(await asyncio.wrap_future(comparison))
        except TimeoutError as error:
            raise RewardError(
                f"task {answer.task_id}: {found[:100]!r} was not compared with the label {wanted[:100]!r} "
                f"within {self._timeout_s:g} s"
            ) from error
        except OSError as error:  # its process died: pebble's ProcessExpired
            raise RewardError(f"task {answer.task_id}: the comparison of its answer died: {error}") from error

    def _started(self) -> ProcessPool:
        """Return the processes, forked from one that has sympy loaded: to replace a killed one is quick."""
        if self._pool is None:
            from actors.rewards.math_equality import prepare

            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["actors.rewards.math_equality"])
            self._pool = ProcessPool(max_workers=self._processes, initializer=prepare, context=context)
        return self._pool

    async def close(self) -> None:
        """Kill the processes."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            pool.stop()
            await asyncio.to_thread(pool.join)


class DeepScaleR(MathAnswer):
    """Grades as DeepScaleR does: only what follows the reasoning counts, an answer without it is wrong."""

    async def __call__(self, answer: Answer) -> float:
        """Score 1 if the last `\\boxed{...}` after `</think>` or `###Response` equals the label."""
        for mark in (END_OF_REASONING, RESPONSE_MARK):
            if mark in answer.text:
                return await self._score(answer, answer.text.rpartition(mark)[2])
        label_of(answer)
        return 0.0


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
