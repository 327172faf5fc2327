"""Prompts of the recipe `calculator`: small problems in words, each of which is one call of a calculator."""

import random
from collections.abc import Iterable, Sequence

from bus.config import Json
from launch.recipes.prompt_files import PromptFiles, PromptRow

TRAINED, HELD_OUT, REWORDED = 4000, 256, 128
SYSTEM = (
    "Use the calculator: write <calculator>12*5</calculator> to have 12*5 computed, and then answer with the "
    "result."
)
EXAMPLES = (
    ("How many legs do 250 spiders have, if each spider has 8 legs?", "250*8", "2000"),
    ("A train has 412 seats, of which 187 are taken. How many are free?", "412-187", "225"),
)
FORMS = (
    ("What is {a} * {b}?", "*"),
    ("What is {a} minus {b}?", "-"),
    ("A box has {a} pens. How many pens are in {b} boxes?", "*"),
    ("Each of {b} trucks carries {a} crates. How many crates do they carry together?", "*"),
    ("A shop had {a} apples and sold {b} of them. How many are left?", "-"),
    ("Anna has {a} coins and gives {b} of them away. How many does she keep?", "-"),
    ("One book costs {a} cents, another one {b} cents. What do both cost?", "+"),
    ("A town had {a} houses, and {b} more were built. How many are there now?", "+"),
)
"""Problems with two numbers, and what is to be done with these."""
NEW_FORMS = (
    ("A hall has {b} rows of {a} chairs. How many chairs does it have?", "*"),
    ("A rope of {a} metres is cut, and {b} metres are taken off. How long is the rest?", "-"),
    ("On Monday {a} people came, on Tuesday {b}. How many came on both days?", "+"),
)
"""Problems that are never trained on."""


def prompts() -> PromptFiles:
    """Return training prompts, held-out ones of other numbers, and some of the latter in new wordings."""
    rng = random.Random(0)
    pairs = [(a, b) for a in range(100, 1000) for b in range(11, 100)]
    rng.shuffle(pairs)
    held = pairs[:HELD_OUT]
    return {
        "heldout": _rows(held, FORMS, rng),
        "new_wordings": _rows(held[:REWORDED], NEW_FORMS, rng),
        "prompts": _rows(pairs[HELD_OUT : HELD_OUT + TRAINED], FORMS, rng),
    }


def _rows(
    pairs: Iterable[tuple[int, int]], forms: Sequence[tuple[str, str]], rng: random.Random
) -> list[PromptRow]:
    return [_row(a, b, *rng.choice(forms)) for a, b in pairs]


def _row(a: int, b: int, form: str, operator: str) -> PromptRow:
    result = {"*": a * b, "-": a - b, "+": a + b}[operator]
    messages: list[Json] = [{"role": "system", "content": SYSTEM}]
    for question, expression, value in EXAMPLES:
        chat = (question, f"<calculator>{expression}</calculator>", f"<result>{value}</result>", value)
        for role, content in zip(("user", "assistant") * 2, chat, strict=True):
            messages.append({"role": role, "content": content})
    messages.append({"role": "user", "content": form.format(a=a, b=b)})
    return {"prompt": messages, "label": str(result)}
