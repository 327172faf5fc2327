"""The short forms by which commands are given the settings of a run, and what these need on this host."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from launch.cli import options
from launch.external_environments.environment import ExternalEnvironment, external_environment
from launch.recipes.recipe import Recipe, recipe
from launch.settings.environment_variables import run_variables
from launch.settings.run_config import Layer, RunConfig, resolve, validate
from launch.settings.short_forms import short_sources, sources_of
from launch.settings.sources import Origins, Source, merged


@dataclass(frozen=True, kw_only=True)
class GivenSettings:
    """Settings of a run, as the flags of a command name them."""

    preset_name: options.PresetName = None
    recipe_name: options.RecipeName = None
    config: options.ConfigFiles = None
    prompts: options.Prompts = None
    reward: options.RewardName = None
    agent: options.AgentCommand = None
    environment: options.EnvironmentName = None

    @cached_property
    def _recipe(self) -> Recipe | None:
        return None if self.recipe_name is None else recipe(self.recipe_name)

    @cached_property
    def _external(self) -> ExternalEnvironment | None:
        return None if self.environment is None else external_environment(self.environment)

    def sources(
        self, settings: object, *,
        bus: str | None = None, creds: Path | None = None, from_run: str | None = None,
    ) -> list[Source]:  # fmt: skip
        """Return all settings of a command, of which `settings` are those given by their own flags, and log
        which of them a later choice of another `type` leaves out."""
        import structlog  # not for help

        external = [] if self._external is None else [Source("flag --environment", self._external.settings)]
        short = short_sources(bus, creds, self.prompts, self.reward, self.agent, from_run)
        named = self._recipe
        of_recipe = None if named is None else Source(f"recipe {named.name}", named.settings)
        above = [*run_variables(), *external, *short]
        sources = sources_of(self.preset_name, self.config, above, settings, recipe=of_recipe)
        # files and flags win over the run that this one begins with
        below = 1 + sum(one is not None for one in (self.preset_name, named))
        sources[below:below] = _of_source_run(merged(sources))
        for replaced in Origins(sources).replaced:
            structlog.get_logger().warning("settings_left_out", reason=replaced)
        return sources

    def prepare(self, *, with_environment: bool = True) -> None:
        """Make what the settings name: the recipe's model and prompts, and the environment of others."""
        if self._recipe is not None:
            self._recipe.prepare()
        if self._external is not None and with_environment:
            self._external.prepare()

    def prepared(self, settings: object, creds: Path | None = None) -> RunConfig:
        """Return the settings of a command that asks a model without a run, once what they need is here."""
        resolved = resolve(merged(self.sources(settings, creds=creds)))
        self.prepare()
        return resolved


OfSettings = Annotated[GivenSettings, Parameter(name="*")]


def _of_source_run(layer: Layer) -> Iterator[Source]:
    """Yield the settings of the model of the run that this one is to begin with, if there is one.

    Raises `ConfigError` for an unknown run or step."""
    if (from_run := layer.get("model", {}).get("from_run")) is None:
        return
    from launch.run_view.source_run import model_settings

    place = validate(
        {name: layer[name] for name in ("run", "directory") if name in layer},
        {"model": {"from_run": from_run}},
    )
    yield Source(f"run {from_run}", {"model": model_settings(place.directory, place.run, from_run)})
