"""Rewards that an agent posts for its own episode."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from actors.gateway.dialects.base import Body
from actors.gateway.dialects.refusal import invalid
from bus.trajectory import LARGEST_REWARD

Number = Annotated[float, Field(strict=True, ge=-LARGEST_REWARD, le=LARGEST_REWARD, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=64)]
MOST_PARTS = 64


class PostedReward(Body):
    """The reward of the outcome, and its parts for the record."""

    reward: Number | Mapping[Name, Number] | None = None
    components: Annotated[Mapping[Name, Number], Field(max_length=MOST_PARTS)] = {}
    """Parts of the reward by name; without `reward` it is their sum."""
    outcome: Number | None = None
    """What a held-out task counts with, where that is not the reward of the agent that was asked first."""
    final: bool = True
    """Whether the reward ends an episode of a client of `launch gateway`; until then it may be replaced."""

    @property
    def value(self) -> float | Mapping[str, float]:
        return sum(self.components.values()) if self.reward is None else self.reward


_NUMBER: TypeAdapter[float] = TypeAdapter(Number)
_POSTED: TypeAdapter[Number | PostedReward] = TypeAdapter(Number | PostedReward)


def turn_reward(raw: bytes) -> float:
    """Read the reward of one turn, a number. Raises `RefusedError` for anything else."""
    try:
        return _NUMBER.validate_json(raw)
    except ValidationError as error:
        raise invalid("the reward of a turn is a finite number") from error


def posted_reward(raw: bytes) -> PostedReward:
    """Read a body: a number, or an object. Raises `RefusedError` for NaN, text, or nothing."""
    try:
        found = _POSTED.validate_json(raw)
    except ValidationError as error:
        raise invalid(_REMEDY) from error
    posted = found if isinstance(found, PostedReward) else PostedReward(reward=found)
    if posted.reward is None and not posted.components:
        raise invalid(_REMEDY)
    return posted


_REMEDY = (
    'a reward is a finite number, or {"reward": number or number by agent, "components": {name: number}} '
    "with at least one of the two"
)
