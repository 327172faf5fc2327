"""Refuses settings of evaluations that do not fit the rest of a run's."""

from typing import TYPE_CHECKING

from bus.errors import ConfigError

if TYPE_CHECKING:
    from launch.settings.run_config import RunConfig


def check_evaluations(config: "RunConfig") -> None:
    """Raise `ConfigError` for a set that nobody answers, and for engines that do not leave their device."""
    endpoints = config.actors.evaluation.endpoints
    if both := sorted(endpoints.keys() & config.actors.opponents.keys()):
        raise ConfigError(
            f"actors.evaluation.endpoints.{both[0]}: this name is that of an opponent: choose another one"
        )
    fixed = [name for name, opponent in config.actors.opponents.items() if opponent.path is not None]
    fixed += endpoints
    for one in config.evaluation.sets:
        if one.answered_by is not None and one.answered_by not in fixed:
            raise ConfigError(
                f"evaluation.sets {one.name!r}: answered_by={one.answered_by!r} is none of actors.opponents "
                f"with a path and none of actors.evaluation.endpoints ({', '.join(fixed) or 'none'}): define "
                f"it, as actors.opponents.{one.answered_by}.path=DIRECTORY or as "
                f"actors.evaluation.endpoints.{one.answered_by}.url=URL with its model"
            )
    pair = config.actors.engine.servers.disaggregation
    if config.actors.evaluation.servers and pair.prefill_url is not None:
        raise ConfigError(
            "actors.evaluation.servers with actors.engine.disaggregation.prefill_url: the servers beside a "
            "pair that runs already would be halves of it: name servers as actors.evaluation.urls"
        )
    for name in ("only", "servers"):
        if config.colocation.enabled and getattr(config.actors.evaluation, name):
            raise ConfigError(
                f"colocation.enabled with actors.evaluation.{name}: its engines do not leave the device to "
                "the learner: leave out one of them, or start that actor with --colocation.no-enabled"
            )


def refuse_nobody_rolls_out(config: "RunConfig") -> None:
    """Raise `ConfigError` where the run's own settings are those of an actor that only evaluates."""
    if config.actors.evaluation.only:
        raise ConfigError(
            "actors.evaluation.only=true in the settings of a run: no actor would roll out; give it to the "
            "`launch actors` that is to evaluate"
        )
