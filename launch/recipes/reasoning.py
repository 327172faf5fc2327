"""Prompts of the recipe `reasoning`: small questions of reasoning-gym, in levels of difficulty."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from bus.config import Json
from launch.recipes.prompt_files import PromptFiles, PromptRow

TRAINED, HELD_OUT, EXAMPLES = 200, 20, 2
"""Most prompts of a level that are trained on, those that are held out, and answered ones in each prompt."""


@dataclass(frozen=True)
class TaskLevel:
    """A data set of reasoning-gym at one difficulty."""

    name: str
    data_set: str
    settings: Mapping[str, int]
    """Settings of the data set, by reasoning-gym's names."""


LEVELS = (
    TaskLevel("sum-1", "chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),
    TaskLevel("sum-2", "chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}),
    TaskLevel("sum-3", "chain_sum", {"min_terms": 3, "max_terms": 3, "min_digits": 2, "max_digits": 2}),
    TaskLevel("product-1", "products", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),
    TaskLevel("product-2", "products", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
    TaskLevel("gcd-1", "gcd", {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 20}),
    TaskLevel("gcd-2", "gcd", {"min_numbers": 2, "max_numbers": 2, "min_value": 20, "max_value": 99}),
    TaskLevel("letters-1", "letter_counting", {"min_words": 1, "max_words": 2}),
    TaskLevel("letters-2", "letter_counting", {"min_words": 4, "max_words": 6}),
    TaskLevel("backward-1", "spell_backward", {"min_word_len": 3, "max_word_len": 3}),
    TaskLevel("backward-2", "spell_backward", {"min_word_len": 4, "max_word_len": 5}),
    TaskLevel("bits-1", "count_bits", {"min_n": 1, "max_n": 99}),
    TaskLevel("bits-2", "count_bits", {"min_n": 100, "max_n": 999}),
    TaskLevel(
        "legs-1", "leg_counting", {"min_animals": 1, "max_animals": 1, "min_instances": 1, "max_instances": 9}
    ),
    TaskLevel(
        "legs-2", "leg_counting", {"min_animals": 2, "max_animals": 2, "min_instances": 1, "max_instances": 9}
    ),
)


def prompts() -> PromptFiles:
    """Return training prompts and held-out ones of all levels, no question of which is in both. Raises
    `ConfigError` where the package reasoning-gym is missing."""
    heldout: list[PromptRow] = []
    trained: list[PromptRow] = []
    for level in LEVELS:
        shown = _questions(level, EXAMPLES, seed=1, besides=())
        held = _questions(level, HELD_OUT, seed=2, besides=shown)
        heldout += [_row(level, one, shown) for one in held]
        trained += [_row(level, one, shown) for one in _questions(level, TRAINED, 3, [*shown, *held])]
    return {"heldout": heldout, "prompts": trained}


def _questions(level: TaskLevel, size: int, seed: int, besides: Iterable[PromptRow]) -> list[PromptRow]:
    from storage.built_in_tasks.reasoning_gym_tasks import prompt_rows  # not for help

    asked = frozenset(str(row["prompt"]) for row in besides)
    return list(prompt_rows(level.data_set, size=size, seed=seed, besides=asked, settings=level.settings))


def _row(level: TaskLevel, asked: PromptRow, shown: Iterable[PromptRow]) -> PromptRow:
    """Return the question after some that are answered, by which the model sees how to answer."""
    messages: list[Json] = []
    for one in shown:
        messages.append({"role": "user", "content": one["prompt"]})
        messages.append({"role": "assistant", "content": one["label"]})
    messages.append({"role": "user", "content": asked["prompt"]})
    entry = cast(Mapping[str, Json], asked["metadata"])
    return {**asked, "prompt": messages, "metadata": {**entry, "level": level.name}}
