"""The reward of tasks that reasoning-gym made: its own verifier of the data set."""

from collections.abc import Mapping

from actors.rewards.base import Answer, Reward, RewardError
from storage.prompts.reasoning_gym_tasks import KEY, data_set, refuse_missing_package


def reasoning_gym_reward() -> Reward:
    """Return the reward. Raises `ConfigError` where the package is missing."""
    refuse_missing_package("reward=reasoning_gym")
    return reasoning_gym


def reasoning_gym(answer: Answer) -> float:
    """Return the score in [0, 1] of what stands between `<answer>` and `</answer>`, or of the whole text.

    Raises `RewardError` for a task of another origin."""
    place = answer.metadata.get(KEY)
    if not isinstance(place, Mapping):
        raise RewardError(
            f"task {answer.task_id} is none of reasoning-gym's: set data.task=reasoning_gym/NAME, or another "
            "reward"
        )
    made = data_set(str(place["data_set"]), _number(place["size"]), _number(place["seed"]))
    return float(made.score_answer(answer=_final(answer.text), entry=made[_number(place["index"])]))


def _final(text: str) -> str:
    _, found, rest = text.rpartition("<answer>")
    return rest.partition("</answer>")[0].strip() if found else text.strip()


def _number(value: object) -> int:
    if not isinstance(value, int):
        raise RewardError(f"metadata {KEY}: {value!r} is no whole number: write the prompts again")
    return value
