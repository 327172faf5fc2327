"""What `--recipe` names: settings with a published model and prompts, which are had once and kept."""

import json
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from bus.errors import ConfigError, nearest
from launch.recipes import agent, calculator, instructions, reasoning, sums
from launch.recipes.prompt_files import PromptFiles
from launch.recipes.pypi_model import PackagedModel, make_directory_of
from launch.settings.run_config import Layer

PROMPTS: Mapping[str, Callable[[], PromptFiles]] = {
    "agent": agent.prompts,
    "calculator": calculator.prompts,
    "instructions": instructions.prompts,
    "reasoning": reasoning.prompts,
    "sums": sums.prompts,
}
"""Functions by the name of their recipe, which return its prompts: `NAME.jsonl` is written for each name."""
PLACE = "{recipe}"
"""What stands in a recipe's settings for the directory of its model and prompts."""


@dataclass(frozen=True)
class Recipe:
    """Settings, and what they need beside them."""

    name: str
    about: str
    model: PackagedModel
    own: Layer
    """Settings, in which `{recipe}` stands for `directory`."""

    @property
    def directory(self) -> Path:
        """Return where model and prompts are kept: in the user's cache."""
        return recipes_directory() / self.name

    @property
    def settings(self) -> Layer:
        """Return all settings; what they name is there after `prepare`."""
        return {name: _placed(value, str(self.directory)) for name, value in self.own.items()}

    def prepare(self) -> None:
        """Make the model's directory and the prompts, if they are not there yet. Raises `ConfigError` where
        the model's package cannot be had or read."""
        from storage.disk.atomic_files import one_at_a_time, write_file  # not for help

        where = self.directory
        with one_at_a_time(where, timeout_s=900.0):
            where.mkdir(parents=True, exist_ok=True)
            make_directory_of(self.model, where / "model")
            for name, rows in PROMPTS[self.name]().items():
                lines = "".join(json.dumps(row) + "\n" for row in rows)
                write_file(where / f"{name}.jsonl", lines.encode())


def user_cache() -> Path:
    """Return the directory of this user's caches, which need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())


def recipes_directory() -> Path:
    return user_cache() / "sluice" / "recipes"


def recipe(name: str) -> Recipe:
    """Return the recipe of that name. Raises `ConfigError` with the nearest match for an unknown one."""
    found = recipe_names()
    if name not in found:
        raise ConfigError(f"no recipe {name!r}: {nearest(name, found)}the recipes are: {', '.join(found)}")
    own = tomllib.loads((files("launch") / "recipes" / f"{name}.toml").read_text())
    described = own.pop("recipe")
    return Recipe(name, described["about"], PackagedModel(**described["model"]), own)


def recipe_names() -> list[str]:
    return sorted(PROMPTS)


def _placed(value: object, directory: str) -> object:
    match value:
        case str():
            return value.replace(PLACE, directory)
        case dict():
            return {name: _placed(one, directory) for name, one in value.items()}
        case list():
            return [_placed(one, directory) for one in value]
    return value
