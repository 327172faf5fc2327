"""Chooses the answers with which a start calls the rewards of its prompts."""

import asyncio
from bisect import bisect
from collections.abc import Iterable, Sequence
from itertools import accumulate

from actors.environments.choice import DEFAULT, chosen_environment
from actors.rewards.base import RewardError
from actors.rewards.builtin.registry import REWARDS
from actors.rewards.scoring.prompt_choices import answer_of_nobody, chosen_reward, refused_reward
from actors.rewards.scoring.sample_call import SampleCall, check_calls
from actors.settings.actors import ActorsConfig
from actors.settings.agents import POSTED
from actors.settings.rewards import SAMPLE_TEXT, RewardConfig
from bus.messages import Prompt


def sample_calls(
    prompts: Iterable[Prompt], actors: ActorsConfig, *, where: str, parts: Sequence[int] = ()
) -> list[SampleCall]:
    """Return a call for the first prompt of each source, environment and reward.

    Quick rewards that are built in have read all prompts already, and posted ones are nobody's to call.

    Args:
        prompts: of one file or of several sources, one after the other.
        actors: names the environments, all of whose choices are allowed.
        where: the prompts come from, for an error.
        parts: number of prompts of each source, where there are several.
    """
    environments, ends = actors.by_name, list(accumulate(parts))
    if not any(_is_called(one) for one in environments.values()):
        return []
    found: dict[tuple[int, str, str], SampleCall] = {}
    for number, prompt in enumerate(prompts):
        environment = str(chosen_environment(prompt.metadata)) if actors.environments else DEFAULT
        config = environments[environment]
        if not isinstance(config, RewardConfig) or not _is_called(config):
            continue
        name, source = chosen_reward(prompt, config), bisect(ends, number)
        key = (source, environment, name)
        if key not in found and (name not in REWARDS or config.group_reward is not None):
            text = SAMPLE_TEXT if prompt.label is None else prompt.label
            answer = answer_of_nobody(prompt, text, task_id="sample call")
            found[key] = SampleCall(f"{where}, prompt {number + 1}", name, config, answer)
    return list(found.values())


class FirstCalls:
    """Calls each reward of an actor once, with a sample answer to the first prompt of it that comes. An actor
    that is started by itself has no prompts at its start, so its rewards are called then."""

    def __init__(self, actors: ActorsConfig) -> None:
        self._actors = actors
        self._called: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def of(self, prompt: Prompt) -> None:
        """Return once the reward of a prompt was called. Raises `ConfigError` for one that does not work."""
        environment = str(chosen_environment(prompt.metadata)) if self._actors.environments else DEFAULT
        config = self._actors.by_name.get(environment)
        is_refused = isinstance(config, RewardConfig) and refused_reward(prompt, config) is not None
        if config is None or is_refused:  # the rollout says so, and what the run does not allow is not loaded
            return
        for call in sample_calls([prompt], self._actors, where="a lease"):
            key = environment, call.name
            if key not in self._called:
                self._called[key] = asyncio.create_task(check_calls([call]), name=f"call {call.name}")
            await asyncio.shield(self._called[key])


def sample_scores(prompts: Sequence[Prompt], actors: ActorsConfig) -> list[str]:
    """Say which rewards three sample answers to the first prompt have: its label, a number, and nothing. Only
    a quick reward that is built in is called, in a run with one environment."""
    config = actors.environment
    if actors.environments or not isinstance(config, RewardConfig) or not prompts:
        return []
    name = chosen_reward(prompts[0], config)
    if name not in REWARDS or prompts[0].label is None:
        return []
    scores = []
    for text in (prompts[0].label, SAMPLE_TEXT, ""):
        try:
            found = f"{REWARDS[name](answer_of_nobody(prompts[0], text, task_id='sample')):g}"
        except RewardError as error:
            found = f"an error ({error})"
        scores.append(f"{text[-40:]!r} has {found}")
    return [f"The reward {name} of answers to prompt 1: {', '.join(scores)}."]


def _is_called(config: object) -> bool:
    if not isinstance(config, RewardConfig) or not config.sample_call or config.reward == POSTED:
        return False
    return config.group_reward is not None or any(name not in REWARDS for name in config.names)
