"""An environment is one record: settings that say what builds it, and what others go by."""

import inspect
from asyncio import Event
from pkgutil import resolve_name
from typing import Annotated, ClassVar, Literal, get_args

import pytest
from pydantic import Field

from actors.environments.build import built_environment
from actors.environments.prompt_choices import refuse_unknown_choices
from actors.episodes.episode import Episode
from actors.episodes.task import Task
from actors.policy.policy import Policy
from actors.settings.actors import ActorsConfig, EnvironmentConfig
from actors.settings.environment import EnvironmentSettings
from actors.settings.rewards import RewardConfig
from benchmarks.scripted_engine import policy_saying
from bus.errors import ConfigError
from bus.messages import Prompt

RECORDS = get_args(get_args(EnvironmentConfig)[0])


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_what_builds_an_environment_is_there_and_takes_what_it_is_called_with(kind):
    options = {"finish_within_s": 1.0} if kind.finishes_after_stop else {}
    inspect.signature(resolve_name(kind.built_by)).bind("config", **options)
    plugin = "environment" in kind.model_fields
    assert kind.has_own_rewards != (issubclass(kind, RewardConfig) or plugin)


class Halved:
    """Gives half of its reward for the right answer."""

    trajectories_per_episode: int | None = 1

    def __init__(self, reward: float, finish_within_s: float) -> None:
        self._reward = reward
        self.finish_within_s = finish_within_s

    async def run(self, task: Task, policy: Policy) -> Episode:
        policy = policy.fresh(task.task_id)
        answer = await policy.chat(task.messages)
        return Episode(policy.trajectories(self._reward / 2 * (answer.text == task.label)))


class HalvedConfig(EnvironmentSettings):
    type: Literal["halved"] = "halved"
    built_by: ClassVar[str] = f"{__name__}:halved"
    finishes_after_stop: ClassVar[bool] = True
    shows_tools: ClassVar[bool] = False
    takes_leases_on_demand: ClassVar[bool] = True

    reward: float = 1.0

    @property
    def reads_native_calls(self) -> bool:
        return True


def halved(config: HalvedConfig, *, finish_within_s: float, token: str | None) -> Halved:
    assert token == "secret"
    return Halved(config.reward, finish_within_s)


class Extended(ActorsConfig):
    """The actors' settings as they are after a name was added to the union of environments."""

    environment: Annotated[get_args(EnvironmentConfig)[0] | HalvedConfig, Field(discriminator="type")] = (
        HalvedConfig()
    )


async def test_a_new_environment_is_built_run_and_refused_by_its_record(tokenizer):
    limits = {"interruption": {"finish_within_s": 7.0}}
    actors = Extended.model_validate({"environment": {"type": "halved", "reward": 3.0}} | limits)
    async with built_environment(actors, Event(), (), token="secret") as environment:
        assert environment.finish_within_s == 7.0
        episode = await environment.run(
            Task(task_id="t", prompt="6*7=", label="42"), policy_saying(tokenizer, "42<|end|>")
        )
    assert [one.reward for one in episode.trajectories] == [1.5]
    assert actors.offers_native_tools
    tools = Prompt(content="a", tools=[{"type": "function", "function": {"name": "x", "parameters": {}}}])
    with pytest.raises(ConfigError, match="the environment 'halved' does not show"):
        refuse_unknown_choices([tools], actors, where="mine.jsonl")
    with pytest.raises(ValueError, match=r"evaluation\.only=true with environment\.type=halved"):
        Extended.model_validate({"evaluation": {"only": True}})
