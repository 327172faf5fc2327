"""The reward `remote`: a server of the user's scores answers."""

from collections.abc import Mapping
from numbers import Real

from actors.episodes.task import JSON, Answer
from actors.rewards.base import LATER, InvalidRewardError, Result, Scored
from actors.rewards.endpoint import Endpoint
from actors.settings.rewards import RewardConfig

ACCEPTED = 202
"""Status that says: the reward comes later."""


class Remote:
    """Posts each answer to a server, which returns its reward."""

    def __init__(self, config: RewardConfig) -> None:
        self._endpoint = Endpoint(config.remote, what="reward remote")

    async def __call__(self, answer: Answer) -> Result:
        """Return the number that the server answers, or its object's `reward` and the others as parts.

        An object without `reward` has parts only. Status 202 says that the reward comes later. Raises
        UnscoredError where the server refuses the answer, fails on it or is away."""
        reply = await self._endpoint.post(request_body(answer))
        return LATER if reply.status == ACCEPTED else _result(reply.body)

    async def close(self) -> None:
        """Close the connections."""
        await self._endpoint.close()


def request_body(answer: Answer) -> dict[str, JSON]:
    """Return what the server is told of an answer."""
    return {
        "task_id": answer.task_id,
        "prompt": list(answer.messages),
        "response": answer.text,
        "label": answer.label,
        "metadata": dict(answer.metadata),
        "finish_reason": answer.finish_reason,
        "token_count": answer.token_count,
    }


def _result(body: JSON) -> Result:
    if isinstance(body, Mapping):
        numbers = {name: _number(value) for name, value in body.items()}
        if "reward" not in numbers:
            return numbers
        return Scored(numbers.pop("reward"), numbers)
    return _number(body)


def _number(value: JSON) -> float:
    if isinstance(value, Real):
        return float(value)
    raise InvalidRewardError(f"reward remote: the server answered {value!r}, where a number is expected")
