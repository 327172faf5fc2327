"""Answers of several agents in one text, each after a letter by which another agent chooses one.

Loads without torch."""

from collections.abc import Iterable
from string import Formatter

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def lettered(answers: Iterable[tuple[int, str]]) -> str:
    """Return numbered answers after the letters of their numbers, as `a 12 b 21`."""
    return " ".join(f"{LETTERS[number]} {answer}" for number, answer in answers)


def number_of_letter(text: str, count: int) -> int | None:
    """Return the number of the answer whose letter was written, of so many; None for any other text."""
    letter = text.strip()
    number = LETTERS.find(letter) if len(letter) == 1 else -1
    return number if 0 <= number < count else None


def refuse_template(name: str, template: str, *, allowed: frozenset[str]) -> None:
    """Raise ValueError for a template that cannot be filled in, lacks `{answers}` or has other fields."""
    try:
        found = {field for _, field, _, _ in Formatter().parse(template) if field is not None}
    except ValueError as error:
        raise ValueError(f"{name}={template!r} cannot be filled in: {error}") from error
    if "answers" not in found or found - allowed:
        others = "".join(f", and may contain {{{field}}}" for field in sorted(allowed - {"answers"}))
        raise ValueError(
            f"{name}={template!r} must contain {{answers}}{others}; other braces are written twice"
        )
