"""Tells answers that make a verifier fail, which get the lowest reward, from verifiers that are broken."""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from actors.rewards.base import AnswerFaultError, RewardError

Given = TypeVar("Given")
Score = TypeVar("Score")
PASSING = (TimeoutError, MemoryError)
"""Failures that the host may cause too, by its load: the answer is tried once more before it is blamed."""


class HostFaultError(RewardError):
    """Something ended a verifier that an answer cannot: it says nothing about the answer."""


@dataclass(frozen=True)
class Failure:
    """How a reward failed on an answer, and what says that something else is to blame."""

    error: Exception
    broken: tuple[object, Exception] | None = None
    """A control on which the reward failed too, and how; None where each works: the answer is to blame."""


async def judged(
    attempt: Callable[[Given], Awaitable[Score | Exception]], answer: Given, *,
    controls: Iterable[Given], repeats: Callable[[Exception], bool] = lambda error: True,
) -> Score | Failure:  # fmt: skip
    """Return what `attempt` gives for `answer`, or how it fails.

    The rule: where it fails on the answer, works on the controls and fails on the answer again, the answer is
    to blame. Where it fails on a control too, what scores it, the label or the host is broken.

    Args:
        attempt: returns the score of an answer, or how that failed. Raises what is not to be judged.
        answer: what the policy wrote or left.
        controls: answers that are scored without failing by what is not broken.
        repeats: tells of a failure whether the answer is tried once more; others count at once."""
    found = await attempt(answer)
    if not isinstance(found, Exception):
        return found
    for control in controls:
        try:
            other = await attempt(control)
        except RewardError as error:
            other = error
        if isinstance(other, Exception):
            return Failure(found, (control, other))
    if repeats(found):
        again = await attempt(answer)
        if not isinstance(again, Exception):
            return again
        found = again
    return Failure(found)


async def verified(
    verify: Callable[[Given], Awaitable[Score]], answer: Given, *,
    control: Given, lowest: float, where: str, passing: tuple[type[Exception], ...] = PASSING,
    control_name: str = "",
) -> Score:  # fmt: skip
    """Return what `verify` gives for `answer`, where a failure is blamed on that or on what surrounds it, by
    the rule of `judged`.

    Args:
        verify: returns the score of an answer, or raises whatever it fails by, `TimeoutError` among it.
        answer: what the policy wrote or left.
        control: an answer that a working verifier scores without failing, such as the right one.
        lowest: least reward that the verifier gives.
        where: names the verifier and the task in errors.
        passing: failures after which the answer is tried once more before it is blamed.
        control_name: what the control is, for errors; its text by default.

    Raises `AnswerFaultError` with `lowest` where the answer is to blame, else `RewardError`."""

    async def attempt(given: Given) -> Score | Exception:
        try:
            return await verify(given)
        except HostFaultError:
            raise
        # A verifier may raise anything, and each error is raised again as one of the two below.
        except Exception as error:  # noqa: BLE001
            return error

    found = await judged(
        attempt, answer, controls=[control], repeats=lambda error: isinstance(error, passing)
    )
    if not isinstance(found, Failure):
        return found
    if found.broken is not None:
        raise RewardError(
            f"{where} failed by {_named(found.error)}, and on {control_name or f'{control!r:.100}'}, which "
            f"it must score, by {_named(found.broken[1])}: the verifier, the label or the host is broken"
        ) from found.error
    raise AnswerFaultError(
        f"{where} failed by {_named(found.error)}, and works on another answer", reward=lowest
    ) from found.error


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]
