"""Reward of questions with several choices, as GPQA's (arXiv:2311.12022): 1.0 or 0.0."""

import re
from collections.abc import Mapping, Sequence
from string import ascii_uppercase

from actors.episodes.task import Answer
from actors.rewards.base import RewardError, label_of
from actors.rewards.final_text import last_boxed, without_reasoning

LETTERS = ascii_uppercase[:10]
"""Letters of the choices where the metadata does not say how many there are."""
_ENDS = r"(?![A-Za-z0-9'\u2019])"
# Each run is taken whole, once (`*+`): a text of spaces or marks alone would otherwise be tried in every way.
_MARKS = r"[\s*_`$(\[{\\]*+(?:text|boxed|mathbf|mathrm)?+[\s*_`$(\[{]*+"
_STATED = re.compile(
    rf"(?i:answer|option|choice)\s*+(?:(?i:is|would be|:)\s*+)*+{_MARKS}([A-Z]){_ENDS}", re.ASCII
)
_CALLED_CORRECT = re.compile(
    r"(?<![A-Za-z0-9'\u2019])([A-Z])[)\]}*]*+\s++is\s++(?:the\s++)?+(?:correct|right)", re.ASCII
)
_STANDALONE = re.compile(rf"(?<![A-Za-z0-9'\u2019])([A-Z]){_ENDS}(?!\s++[a-z])", re.ASCII)


def gpqa(answer: Answer) -> float:
    """Score 1 if the choice that the text names last, after its reasoning, is the right one.

    A boxed letter counts first; then the last `answer is X`, `option X`, `choice: X` or `X is correct`; then
    the last letter that stands alone; then the right choice's own words, if no other choice's occur. The
    label is a letter, or the words of a choice in `metadata.choices`; `metadata.correct_letter` names the
    letter where the label does not, `metadata.valid_letters` the letters where they are not A, B, C, ..."""
    choices = _choices(answer)
    letters = _letters(answer, choices)
    correct = _correct_letter(answer, choices, letters)
    text = without_reasoning(answer.text)
    if (named := named_letter(text, letters)) is not None:
        return float(named == correct)
    if not choices:
        return 0.0
    words = f" {_words(text)} "
    said = [n for n, choice in zip(letters, choices, strict=False) if f" {_words(choice)} " in words]
    return float(said == [correct])


def named_letter(text: str, letters: Sequence[str]) -> str | None:
    """Return the choice that a text decides for; None where no letter of a choice is named."""
    boxed = _STANDALONE.findall(last_boxed(text) or "")
    if boxed and boxed[-1] in letters:
        return str(boxed[-1])
    stated = [*_STATED.finditer(text), *_CALLED_CORRECT.finditer(text)]
    for match in sorted(stated, key=lambda found: found.start(1), reverse=True):
        if match[1] in letters:
            return match[1]
    alone = [letter for letter in _STANDALONE.findall(text) if letter in letters]
    return str(alone[-1]) if alone else None


def _choices(answer: Answer) -> list[str]:
    found = answer.metadata.get("choices")
    if found is None:
        return []
    listed = list(found.values()) if isinstance(found, Mapping) else found
    if (
        isinstance(listed, str)
        or not isinstance(listed, Sequence)
        or not 2 <= len(listed) <= len(ascii_uppercase)
    ):
        raise RewardError(
            f"task {answer.task_id}: 'choices' in its metadata is {found!r}: give a list of texts"
        )
    return [str(choice) for choice in listed]


def _letters(answer: Answer, choices: Sequence[str]) -> list[str]:
    found = answer.metadata.get("valid_letters")
    if found is None:
        return list(ascii_uppercase[: len(choices)] if choices else LETTERS)
    if not isinstance(found, str | Sequence) or not found:
        raise RewardError(f"task {answer.task_id}: 'valid_letters' in its metadata is {found!r}: give a list")
    return [str(letter).strip().upper() for letter in found]


def _correct_letter(answer: Answer, choices: Sequence[str], letters: Sequence[str]) -> str:
    given = answer.metadata.get("correct_letter")
    label = (given if isinstance(given, str) else label_of(answer)).strip()
    if label.upper() in letters:
        return label.upper()
    words = [_words(choice) for choice in choices]
    if _words(label) in words and (place := words.index(_words(label))) < len(letters):
        return letters[place]
    raise RewardError(
        f"task {answer.task_id}: the label {label!r} is neither one of the letters {', '.join(letters)} nor "
        f"one of its {len(choices)} choices"
    )


def _words(text: str) -> str:
    return " ".join(re.findall(r"[^\W_]+", text.lower()))
