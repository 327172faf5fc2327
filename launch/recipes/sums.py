"""Prompts of the recipe `sums`: two numbers below 100, added in three wordings."""

import random
from collections.abc import Iterable

from launch.recipes.prompt_files import PromptFiles, PromptRow

HELD_OUT = 256
TRAINED = 8000
FORMS = (
    "What is {a} + {b}? Answer with the number only.",
    "Add {a} and {b}. Answer with the number only.",
    "How much is {a} plus {b}? Answer with the number only.",
)


def prompts() -> PromptFiles:
    """Return training prompts, and held-out ones, whose pairs are not trained on."""
    rng = random.Random(0)
    pairs = [(a, b) for a in range(1, 100) for b in range(1, 100)]
    rng.shuffle(pairs)
    held, trained = pairs[:HELD_OUT], pairs[HELD_OUT : HELD_OUT + TRAINED]
    heldout = _rows(held, rng)
    return {"prompts": _rows(trained, rng), "heldout": heldout}


def _rows(pairs: Iterable[tuple[int, int]], rng: random.Random) -> list[PromptRow]:
    return [{"prompt": rng.choice(FORMS).format(a=a, b=b), "label": str(a + b)} for a, b in pairs]
