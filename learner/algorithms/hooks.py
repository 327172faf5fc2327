"""Functions of the user's own that are called once a step: on the rewards, and before the update."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from bus.errors import ConfigError, TrainingError, with_traceback
from bus.process.plugins import RAISED
from bus.trajectory import LARGEST_REWARD, Groups, Trajectory
from learner.algorithms.plugin import asked_for, load_plugin
from learner.config.learner import LearnerConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.plugin import HookConfig
from learner.distributed.exact_sums import SumsOverRanks
from learner.distributed.process_group import gathered

T = TypeVar("T")
Lent = AbstractContextManager[Mapping[str, Tensor]]
"""This rank's parts of the trained weights by name, which count as they are on leaving."""
NO_WEIGHTS: Mapping[str, Tensor] = {}
BUILT_WITH = ("matrices", "state_dtype", "offload")
"""Settings that an optimizer was built with, which no step can change."""


def with_processed_rewards(groups: Groups, learner: LearnerConfig, sums: SumsOverRanks) -> Groups:
    """Return the groups with the rewards that `learner.reward_hook` gives them; without one, as they are.

    The function takes this rank's groups, in which all trajectories of a prompt are together, and returns a
    reward for each trajectory. `sums` adds up over ranks, if it has a parameter of that name. Every rank
    calls this. Raises `ConfigError` for anything else than a reward each, and `TrainingError` when it takes
    too long."""
    hook = learner.reward_hook
    if hook.function is None:
        return groups
    found: Sequence[Sequence[float]] = _called("reward_hook", hook, groups, sums=sums)
    if [len(rewards) for rewards in found] != [len(group) for group in groups]:
        raise ConfigError(
            f"learner.reward_hook {hook.function!r} returned {[len(rewards) for rewards in found]} rewards "
            f"for groups of {[len(group) for group in groups]} trajectories: return one for each"
        )
    return [
        [_rewarded(t, reward, hook.function) for t, reward in zip(group, rewards, strict=True)]
        for group, rewards in zip(groups, found, strict=True)
    ]


def _rewarded(trajectory: Trajectory, reward: float, function: str) -> Trajectory:
    value = float(reward)
    if not abs(value) <= LARGEST_REWARD:  # also refuses NaN
        raise ConfigError(
            f"learner.reward_hook {function!r} gave {trajectory.trajectory_id} the reward {value}: return "
            "finite numbers that float32 holds"
        )
    return replace(trajectory, reward=value)


def optimizer_of_step(
    step: int,
    groups: Groups,
    learner: LearnerConfig,
    lend: Callable[[], Lent] = lambda: nullcontext(NO_WEIGHTS),
) -> OptimizerConfig:
    """Return the optimizer's settings for `step`, which `learner.before_step` may change.

    The function takes the number of the step, this rank's groups and the configured settings, and returns
    other settings, or None to leave them. With a parameter `model` it is lent the weights, by `lend`. Every
    rank calls this, and is to return the same. Raises
    `ConfigError` where they differ, or are none that this optimizer can take, and `TrainingError` when the
    function takes too long."""
    hook = learner.before_step
    if hook.function is None:
        return learner.optimizer
    lent = lend() if _asks_for_model(hook) else nullcontext(NO_WEIGHTS)
    with lent as model:
        found = _called("before_step", hook, step, groups, learner.optimizer, model=model)
    chosen = learner.optimizer if found is None else found
    if not isinstance(chosen, OptimizerConfig):
        raise ConfigError(
            f"learner.before_step {hook.function!r} returned {type(chosen).__name__}: return an "
            "OptimizerConfig, as optimizer.model_copy(update={'lr': 1e-6}), or None"
        )
    for name in BUILT_WITH:
        if getattr(chosen, name) != getattr(learner.optimizer, name):
            raise ConfigError(
                f"learner.before_step {hook.function!r} changed {name}, with which the optimizer was built: "
                f"set learner.optimizer.{name}"
            )
    if len({settings.model_dump_json() for settings in gathered(chosen)}) > 1:
        raise ConfigError(
            f"learner.before_step {hook.function!r} returned other settings on other ranks, which have other "
            "groups: go by the step alone"
        )
    return chosen


def figures_after_step(step: int, learner: LearnerConfig, lend: Callable[[], Lent]) -> dict[str, float]:
    """Return the numbers that `learner.after_step` gives, as they are recorded; none without one.

    The function takes the number of the step and the weights, lent by `lend`. Every rank calls this. Raises
    `ConfigError` for anything else than numbers by name, and `TrainingError` when it takes too long."""
    hook = learner.after_step
    if hook.function is None:
        return {}
    with lend() as model:
        found = _called("after_step", hook, step, model)
    try:
        return {f"own_{name}": float(value) for name, value in ({} if found is None else found).items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"learner.after_step {hook.function!r} returned {found!r:.100}: return numbers by name, as "
            "{'norm': 1.5}, or None"
        ) from error


def _asks_for_model(hook: HookConfig) -> bool:
    return hook.plugin is not None and "model" in asked_for(
        "before_step", load_plugin("before_step", hook.plugin)
    )


def _called(kind: str, hook: HookConfig, *args: object, **offered: object) -> Any:
    """Call the function of a hook, and wait for what it returns if it is `async`."""
    plugin = hook.plugin
    if plugin is None:
        raise ValueError(f"learner.{kind} names no function")
    function = load_plugin(kind, plugin)
    wanted = [name for name in asked_for(kind, function) if name not in plugin.settings]
    what = f"learner.{kind} {plugin.function!r}"
    try:
        result = function(*args, **plugin.settings, **{name: offered[name] for name in wanted})
        if inspect.isawaitable(result):
            return asyncio.run(_within(result, hook.timeout_s))  # torch's thread has no event loop of its own
    except _HangsError as error:
        raise TrainingError(
            f"{what} took longer than {hook.timeout_s:g} s: see what it waits for, or raise "
            f"learner.{kind}.timeout_s"
        ) from error
    except RAISED as error:  # a user's function may raise anything
        raise ConfigError(with_traceback(f"{what} raised {error!r}", error)) from error
    return result


class _HangsError(Exception):
    """The function of a hook took longer than its time limit."""


async def _within(result: Awaitable[T], timeout_s: float) -> T:
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await result
    except TimeoutError as error:
        if limit.expired():
            raise _HangsError from error
        raise  # the function's own
