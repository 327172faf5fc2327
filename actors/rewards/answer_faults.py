"""Tells answers that make a verifier fail, which get the lowest reward, from verifiers that are broken."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from actors.rewards.base import AnswerFaultError, RewardError

Given = TypeVar("Given")
Score = TypeVar("Score")
PASSING = (TimeoutError, MemoryError)
"""Failures that the host may cause too, by its load: the answer is tried once more before it is blamed."""


class HostFaultError(RewardError):
    """Something ended a verifier that an answer cannot: it says nothing about the answer."""


async def verified(
    verify: Callable[[Given], Awaitable[Score]], answer: Given, *,
    control: Given, lowest: float, where: str, passing: tuple[type[Exception], ...] = PASSING,
    control_name: str = "",
) -> Score:  # fmt: skip
    """Return what `verify` gives for `answer`, where a failure is blamed on that or on what surrounds it.

    The rule: where `verify` fails on the answer and works on `control`, the answer made it fail. A failure
    that load may cause is blamed on the answer only where it fails so again, after the control worked. Where
    the control fails too, the verifier, the label or the host is broken.

    Args:
        verify: returns the score of an answer, or raises whatever it fails by, `TimeoutError` among it.
        answer: what the policy wrote or left.
        control: an answer that a working verifier scores without failing, such as the right one.
        lowest: least reward that the verifier gives.
        where: names the verifier and the task in errors.
        passing: failures after which the answer is tried once more before it is blamed.
        control_name: what the control is, for errors; its text by default.

    Raises `AnswerFaultError` with `lowest` where the answer is to blame, else `RewardError`."""
    try:
        return await verify(answer)
    except HostFaultError:
        raise
    # A verifier may raise anything, and each error is raised again as one of the two below.
    except Exception as error:  # noqa: BLE001
        found = error
    try:
        await verify(control)
    except Exception as error:  # noqa: BLE001
        raise RewardError(
            f"{where} failed by {_named(found)}, and on {control_name or f'{control!r:.100}'}, which it must "
            f"score, by {_named(error)}: the verifier, the label or the host is broken"
        ) from found
    if isinstance(found, passing):
        try:
            return await verify(answer)
        except HostFaultError:
            raise
        except passing as error:
            found = error
    raise AnswerFaultError(
        f"{where} failed by {_named(found)}, and works on another answer", reward=lowest
    ) from found


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]
