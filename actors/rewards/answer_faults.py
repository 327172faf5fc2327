"""Tells answers that make a verifier fail, which get the lowest reward, from verifiers that are broken."""

from collections.abc import Awaitable, Callable

from actors.rewards.base import AnswerFaultError, RewardError

PASSING = (TimeoutError, MemoryError)
"""Failures that the host may cause too, by its load: the answer is tried once more before it is blamed."""


class HostFaultError(RewardError):
    """Something ended a verifier that an answer cannot: it says nothing about the answer."""


async def verified(
    verify: Callable[[str], Awaitable[float]], text: str, *, control: str, lowest: float, where: str
) -> float:
    """Return what `verify` gives for `text`, where a failure is blamed on the text or on what surrounds it.

    The rule: where `verify` fails on the text and works on `control`, the text made it fail. A failure that
    load may cause is blamed on the text only where it fails so again, after the control worked. Where the
    control fails too, the verifier, the label or the host is broken.

    Args:
        verify: returns the score of a text, or raises whatever it fails by, `TimeoutError` among it.
        text: what the policy wrote.
        control: a text that a working verifier scores without failing, such as the right answer.
        lowest: least reward that the verifier gives.
        where: names the verifier and the task in errors.

    Raises `AnswerFaultError` with `lowest` where the text is to blame, else `RewardError`."""
    try:
        return await verify(text)
    except HostFaultError:
        raise
    # A verifier may raise anything, and each error is raised again as one of the two below.
    except Exception as error:  # noqa: BLE001
        found = error
    try:
        await verify(control)
    except Exception as error:  # noqa: BLE001
        raise RewardError(
            f"{where} failed by {_named(found)}, and on {control[:100]!r}, which it must score, by "
            f"{_named(error)}: the verifier, the label or the host is broken"
        ) from found
    if isinstance(found, PASSING):
        try:
            return await verify(text)
        except PASSING as error:
            found = error
    raise AnswerFaultError(
        f"{where} failed by {_named(found)}, and works on another answer", reward=lowest
    ) from found


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]
