"""Finds the function of a configured advantage, correction, loss, aggregation or hook: built in or a
user's."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pkgutil import resolve_name
from typing import Any

from bus.errors import ConfigError
from bus.process.plugins import load_function
from learner.config.learner import LearnerConfig
from learner.config.plugin import Choice, HookConfig, Plugin

ARGUMENTS = {
    "advantage": ("groups",),
    "correction": ("log_ratio", "sequence"),
    "loss": ("tokens",),
    "aggregation": ("lengths", "prompts"),
    "reward_hook": ("groups",),
    "before_step": ("step", "groups", "optimizer"),
    "after_step": ("step", "model"),
}
"""Says what a function of each kind is called with, in order, before its settings."""
OFFERED = {
    "advantage": ("sums", "token_penalties", "baselines", "critic"),
    "reward_hook": ("sums",),
    "before_step": ("model",),
}
"""Says what a function of a kind gets besides, if it has a parameter of that name."""


def chosen_function(kind: str, config: Choice) -> Callable[..., Any]:
    """Return the function that `config` names, with its settings. Raises `ConfigError` as `load_plugin`
    does."""
    if isinstance(config, Plugin):
        return partial(load_plugin(kind, config), **config.settings)
    settings = config.model_dump(exclude={"type", *config.read_elsewhere})
    return partial(resolve_name(config.computed_by), **settings)


def load_plugin(kind: str, config: Plugin) -> Callable[..., Any]:
    """Import the function that `config` names.

    Raises `ConfigError` when it does not exist or cannot be called with what it gets, naming both."""
    function: Callable[..., Any] = load_function(kind, config.function, {})
    offered = dict.fromkeys(_asked_for(kind, function, config.settings))
    try:
        inspect.signature(function).bind(*ARGUMENTS[kind], **config.settings, **offered)
    except TypeError as error:
        given = ", ".join((*ARGUMENTS[kind], *(f"{name}=..." for name in config.settings)))
        raise ConfigError(
            f"{kind} {config.function!r} has the parameters {inspect.signature(function)} and is called with "
            f"({given}): {error}; change the function or learner.{kind}.settings"
        ) from error
    return function


def asked_for(kind: str, function: Callable[..., Any]) -> list[str]:
    """Return the names in `OFFERED` that are parameters of a chosen function, and of none of its settings."""
    if isinstance(function, partial):
        return _asked_for(kind, function.func, function.keywords)
    return _asked_for(kind, function, {})


def _asked_for(kind: str, function: Callable[..., Any], settings: Mapping[str, object]) -> list[str]:
    parameters = inspect.signature(function).parameters
    return [name for name in OFFERED.get(kind, ()) if name in parameters and name not in settings]


def refuse_bad_plugins(learner: LearnerConfig) -> None:
    """Raise `ConfigError` for a function of the user's that cannot be used, before anything else is begun."""
    for kind in ARGUMENTS:
        config = getattr(learner, kind)
        if isinstance(config, HookConfig):
            config = config.plugin
        if isinstance(config, Plugin):
            load_plugin(kind, config)
