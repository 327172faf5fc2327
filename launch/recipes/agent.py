"""Prompts of the recipe `agent`: what things cost, whose prices `price_agent` alone can see."""

import random
from collections.abc import Sequence

from bus.config import Json
from launch.recipes.prompt_files import PromptFiles, PromptRow

TRAINED, HELD_OUT = 4000, 256
SOLD = 6
"""Things whose prices an episode has."""
THINGS = (
    "bag", "ball", "bed", "bell", "belt", "bike", "book", "boot", "bowl", "box", "brush", "cap", "chair",
    "clock", "coat", "comb", "cup", "desk", "doll", "door", "drum", "fan", "flag", "fork", "glove",
    "hammer", "hat", "jar", "kite", "knife", "lamp", "lock", "mat", "mirror", "mug", "nail", "pan", "pen",
    "pipe", "plate", "pot", "ring", "rope", "saw", "scarf", "shelf", "shirt", "shoe", "sock", "spoon",
    "stool", "table", "tent", "tie", "towel", "tray", "wheel", "whistle",
)  # fmt: skip
NEW_THINGS = ("basket", "bottle", "broom", "candle", "drill", "guitar", "helmet", "ladder", "pillow", "radio")


def prompts() -> PromptFiles:
    """Return training prompts, and held-out ones of things that are not trained on."""
    rng = random.Random(0)
    return {
        "heldout": [_row(NEW_THINGS, rng) for _ in range(HELD_OUT)],
        "prompts": [_row(THINGS, rng) for _ in range(TRAINED)],
    }


def _row(things: Sequence[str], rng: random.Random) -> PromptRow:
    """Return a question for the price of one thing, or for that of two together."""
    prices: dict[str, Json] = {}
    sold = rng.sample(things, SOLD)
    costs = [rng.randrange(2, 100) for _ in sold]
    prices.update(zip(sold, costs, strict=True))
    if rng.random() < 0.5:
        question, label = f"What does the {sold[0]} cost?", costs[0]
    else:
        question, label = f"What do the {sold[0]} and the {sold[1]} cost together?", costs[0] + costs[1]
    return {"prompt": question, "label": str(label), "metadata": {"prices": prices}}
