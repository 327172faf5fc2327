"""Checks what a reward returned, and makes one number of its parts."""

from collections.abc import Mapping
from numbers import Real
from typing import cast

from actors.rewards.base import LATER, AnswerFaultError, InvalidRewardError, Late, RewardError, Scored
from bus.trajectory import LARGEST_REWARD

EXPECTED = "a reward is a finite number that float32 holds, a dict of such numbers by name, Scored, or LATER"


def checked(
    outcome: object, where: str, *, weights: Mapping[str, float], timeout_s: float | None
) -> Scored | Late:
    """Return the reward that a call gave, also by an `AnswerFaultError`. Raises `RewardError` for another
    exception, `InvalidRewardError` for what is no reward.

    Args:
        outcome: what the function returned, or the exception that it raised.
        where: names the reward and the answer in errors.
        weights: of the parts by name; empty where they are summed.
        timeout_s: limit of the call, for the error that says it passed.
    """
    if isinstance(outcome, AnswerFaultError):
        return Scored(_number(outcome.reward, where), fault=str(outcome))
    if isinstance(outcome, RewardError):
        raise outcome
    if isinstance(outcome, TimeoutError):
        raise RewardError(f"{where}: no result within {timeout_s} s") from outcome
    if isinstance(outcome, Exception):
        raise RewardError(f"{where} raised {outcome!r}") from outcome
    if outcome is LATER:
        return LATER
    if isinstance(outcome, Scored):
        components = _parts(outcome.components, where) if outcome.components else {}
        reward = _weighed(components, weights, where) if weights and components else outcome.reward
        return Scored(_number(reward, where), components)
    if isinstance(outcome, Mapping):
        components = _parts(outcome, where)
        return Scored(_number(_weighed(components, weights, where), where), components)
    return Scored(_number(outcome, where))


def _parts(parts: Mapping[str, object], where: str) -> dict[str, float]:
    if not parts or not all(isinstance(name, str) and name for name in parts):
        raise InvalidRewardError(f"{where} returned {parts!r}: {EXPECTED}")
    return {name: _number(value, f"{where}, in its part {name!r},") for name, value in parts.items()}


def _weighed(parts: Mapping[str, float], weights: Mapping[str, float], where: str) -> float:
    """Return the weighted sum of the parts; without weights, their sum."""
    if not weights:
        return sum(parts.values())
    if missing := sorted(weights.keys() - parts.keys()):
        raise InvalidRewardError(
            f"{where} returned no part {missing[0]!r}, which reward_weights names: it has {sorted(parts)}"
        )
    return sum(weight * parts[name] for name, weight in weights.items())


def _number(value: object, where: str) -> float:
    value = _without_dimensions(value)
    if not isinstance(value, Real) or not abs(cast(float, value)) <= LARGEST_REWARD:
        raise InvalidRewardError(f"{where} returned {value!r}: {EXPECTED}")
    return float(value)


def _without_dimensions(value: object) -> object:
    """Return the number in a tensor or array of no dimensions, and anything else as it is."""
    if getattr(value, "shape", None) == () and callable(item := getattr(value, "item", None)):
        return cast(object, item())
    return value
