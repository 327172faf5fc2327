"""Built-in tasks whose answers only a tool knows: facts of a small corpus, and goods of a shop.

Facts and goods are drawn by fixed seeds, so that every host has the same ones without a file."""

from collections.abc import Sequence
from functools import cache
from random import Random

from bus.codec import Json

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
NAMES = (len(CONSONANTS) * len(VOWELS)) ** 2
"""Number of names of two syllables."""


def _name(number: int) -> str:
    second, first = divmod(number, len(CONSONANTS) * len(VOWELS))
    return "".join(CONSONANTS[one // len(VOWELS)] + VOWELS[one % len(VOWELS)] for one in (first, second))


def _user(content: str) -> Json:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Json:
    return {"role": "assistant", "content": content}


# --- search: one of four facts about somebody, which stands in one passage of the corpus ---

FACTS = ("home", "work", "food", "boss")
SEARCH_PROBLEMS = NAMES * len(FACTS)
FACTS_SEED = 2503


def search_problem(number: int) -> tuple[str, str]:
    """Return the question for a fact, and the word that answers it."""
    return f"{_fact(number)}?", _answers()[number]


def search_passages() -> Sequence[str]:
    """Return the corpus: a passage for each fact."""
    return [_passage(number) for number in range(SEARCH_PROBLEMS)]


def search_demonstration(number: int, rng: Random, wrong: bool) -> tuple[list[Json], str]:
    """Return a turn of a chat with the tool `search`: the query, or the answer of the first passage found.

    Wrong first turns answer with the name, or search for another fact about it; wrong second turns answer
    with that fact. All of them copy something: a model that learns from too much noise does not learn to."""
    question = search_problem(number)[0]
    name, kind = divmod(number, len(FACTS))
    first, chosen = rng.random() < 0.5, rng.random()
    other = rng.choice([name * len(FACTS) + n for n in range(len(FACTS)) if n != kind])
    if wrong and chosen < 0.4:
        return [_user(question)], _name(name)
    asked, beside = (other, number) if wrong else (number, other)
    call = f"<search>{_fact(asked)}</search>"
    if (wrong and chosen < 0.8) or (not wrong and first):
        return [_user(question)], call
    return _found(question, call, asked, beside), _answers()[asked]


@cache
def _answers() -> Sequence[str]:
    """Return the answer to each problem. No answer is a name, so that a query finds no passage by it."""
    rng = Random(FACTS_SEED)
    return ["".join(map(rng.choice, (VOWELS, CONSONANTS) * 2)) for _ in range(SEARCH_PROBLEMS)]


def _fact(number: int) -> str:
    name, kind = divmod(number, len(FACTS))
    return f"{FACTS[kind]} of {_name(name)}"


def _passage(number: int) -> str:
    return f"{_fact(number)}: {_answers()[number]}"


def _found(question: str, call: str, *numbers: int) -> list[Json]:
    texts = "\n".join(f"[{n}] {_passage(number)}" for n, number in enumerate(numbers, 1))
    return [_user(question), _assistant(call), _user(f"<result>{texts}</result>")]


# --- shop: price, stock or weight of an item, each of which another tool knows ---

SHOP_TOOLS = ("price", "stock", "weight")
"""Tools by what they tell. Their first letters differ, so that one character decides which one is called."""
SHOP_PROBLEMS = NAMES * len(SHOP_TOOLS)
SHOP_SEED = 2411


def shop_problem(number: int) -> tuple[str, str]:
    """Return the question for an item, and the number that answers it."""
    item, kind = divmod(number, len(SHOP_TOOLS))
    return f"{SHOP_TOOLS[kind]} of {_name(item)}?", _figures()[number]


def shop_answer(tool: str, item: str) -> str:
    """Return what a tool of the shop says about an item. Raises `KeyError` for one that it does not have."""
    return _figures()[_items()[item] * len(SHOP_TOOLS) + SHOP_TOOLS.index(tool)]


def shop_demonstration(number: int, rng: Random, wrong: bool) -> tuple[list[Json], str]:
    """Return a turn of a chat with the shop's tools: the call of one, or the answer that copies its result.

    Wrong first turns guess, or call another tool than the question needs; wrong second turns answer with
    what that one has said."""
    question, answer = shop_problem(number)
    item, kind = divmod(number, len(SHOP_TOOLS))
    first, chosen = rng.random() < 0.5, rng.random()
    used = rng.choice([n for n in range(len(SHOP_TOOLS)) if n != kind]) if wrong else kind
    call = f"<{SHOP_TOOLS[used]}>{_name(item)}</{SHOP_TOOLS[used]}>"
    if wrong and chosen < 0.4:
        return [_user(question)], str(rng.randint(100, 999))
    if (wrong and chosen < 0.8) or (not wrong and first):
        return [_user(question)], call
    said = _figures()[item * len(SHOP_TOOLS) + used] if wrong else answer
    return [_user(question), _assistant(call), _user(f"<result>{said}</result>")], said


@cache
def _figures() -> Sequence[str]:
    """Return the answer to each problem, of three digits."""
    rng = Random(SHOP_SEED)
    return [str(rng.randint(100, 999)) for _ in range(SHOP_PROBLEMS)]


@cache
def _items() -> dict[str, int]:
    return {_name(number): number for number in range(NAMES)}
