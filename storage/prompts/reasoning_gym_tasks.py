"""Tasks of the package reasoning-gym as prompts: `data.task = "reasoning_gym/NAME"`."""

from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from bus.codec import Json
from bus.errors import ConfigError

PREFIX = "reasoning_gym/"
KEY = "reasoning_gym"
"""Field of a prompt's metadata that says which entry of which data set it is."""


def refuse_missing_package(what: str) -> None:
    """Raise `ConfigError` for `what` needs the package, where that is not installed."""
    if find_spec("reasoning_gym") is None:
        raise ConfigError(f"{what} needs the package reasoning-gym: pip install 'sluice-rl[reasoning-gym]'")


@lru_cache(maxsize=64)
def data_set(name: str, size: int, seed: int) -> Any:
    """Return a data set of reasoning-gym, whose entries are made when they are asked for.

    Raises `ConfigError` for one that does not exist, and where the package is missing."""
    refuse_missing_package(f"the data set {PREFIX}{name}")
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"reasoning-gym has no data set {name!r} of default settings: {error}") from error


def prompt_rows(
    name: str, *, size: int, seed: int, besides: frozenset[str] = frozenset()
) -> Iterator[dict[str, Json]]:
    """Return `size` rows of a prompt file, with distinct questions that are not among `besides`.

    Fewer where the data set repeats itself too often. Raises as `data_set` does."""
    drawn = data_set(name, 2 * size, seed)
    seen = set(besides)
    for index in range(2 * size):
        if len(seen) - len(besides) == size:
            return
        entry = drawn[index]
        question = str(entry["question"])
        if question not in seen:
            seen.add(question)
            place: dict[str, Json] = {"data_set": name, "size": 2 * size, "seed": seed, "index": index}
            label = None if entry["answer"] is None else str(entry["answer"])
            yield {"prompt": question, "label": label, "metadata": {KEY: place}}
