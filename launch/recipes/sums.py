"""Prompts of the recipe `sums`: two numbers below 100, added in three wordings."""

import json
import random
from collections.abc import Iterable

HELD_OUT = 256
TRAINED = 8000
FORMS = (
    "What is {a} + {b}? Answer with the number only.",
    "Add {a} and {b}. Answer with the number only.",
    "How much is {a} plus {b}? Answer with the number only.",
)


def prompts() -> tuple[str, str]:
    """Return the lines of the training prompts and of the held-out ones, whose pairs are not trained on."""
    rng = random.Random(0)
    pairs = [(a, b) for a in range(1, 100) for b in range(1, 100)]
    rng.shuffle(pairs)
    held, trained = pairs[:HELD_OUT], pairs[HELD_OUT : HELD_OUT + TRAINED]
    held_lines = _lines(held, rng)
    return _lines(trained, rng), held_lines


def _lines(pairs: Iterable[tuple[int, int]], rng: random.Random) -> str:
    rows = ({"prompt": rng.choice(FORMS).format(a=a, b=b), "label": str(a + b)} for a, b in pairs)
    return "".join(json.dumps(row) + "\n" for row in rows)
