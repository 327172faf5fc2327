"""Instructions about words, letters and length, each a function from a text to whether it follows."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

Relation = Literal["at least", "less than"]
_WORD = re.compile(r"\w+(?:['\u2019-]\w+)*")
# Each run of marks is tried once, from its beginning, so that a text of nothing else takes linear time.
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]++[\"'\u201d\u2019)\]]*+(?=\s|$)")
_ABBREVIATION = re.compile(
    r"(?:\b(?:mr|mrs|ms|dr|prof|st|vs|e\.g|i\.e|etc|no|inc|jr|sr)|\b[A-Za-z])\.$", re.IGNORECASE
)
_LONGEST_ABBREVIATION = 12
"""Characters before the end of a sentence in which an abbreviation is looked for, with what precedes it."""


def holds(count: int, relation: Relation, bound: int) -> bool:
    """Return whether a count is `at least` the bound, or `less than` it. Raises ValueError for others."""
    if relation not in ("at least", "less than"):
        raise ValueError(f"the relation {relation!r} is neither 'at least' nor 'less than'")
    return count >= bound if relation == "at least" else count < bound


def occurrences(text: str, word: str) -> int:
    """Count a word or phrase, not as a part of longer words and whatever its case."""
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def forbidden_words(text: str, *, forbidden_words: Sequence[str]) -> bool:
    """None of the words occurs."""
    return not any(occurrences(text, word) for word in _listed(forbidden_words))


def letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: Relation) -> bool:
    """The letter occurs so often, in either case."""
    if len(letter) != 1:
        raise ValueError(f"{letter!r} is not one letter")
    return holds(text.lower().count(letter.lower()), let_relation, let_frequency)


def count_sentences(text: str) -> int:
    """Count sentences that have a letter or a digit."""
    return sum(any(map(str.isalnum, part)) for part in split_sentences(text))


def split_sentences(text: str) -> list[str]:
    """Return the runs of text up to `.`, `!` or `?`, but not up to the dot of an abbreviation."""
    ends = [
        match.end()
        for match in _SENTENCE_END.finditer(text)
        if not _ABBREVIATION.search(text[max(0, match.end() - _LONGEST_ABBREVIATION) : match.end()])
    ]
    parts = [text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)], strict=True)]
    return [part.strip() for part in parts if part.strip()]


def number_of_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """Lines of `***` separate exactly so many paragraphs, none of which is empty."""
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    inner = parts[bool(not parts[0]) : len(parts) - bool(not parts[-1])]  # separators at the ends are allowed
    return all(inner) and len(inner) == num_paragraphs


def nth_paragraph_first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Blank lines separate exactly so many paragraphs, and the nth of them, from 1, begins with the word."""
    parts = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    begin = _WORD.search(parts[nth_paragraph - 1])
    return begin is not None and begin[0].lower() == first_word.strip().lower()


def _listed(words: Sequence[str]) -> Sequence[str]:
    if isinstance(words, str) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"{words!r} is no list of words")
    return words


TEXT_CHECKS: Mapping[str, Callable[..., bool]] = {
    "change_case:capital_word_frequency": lambda text, *, capital_frequency, capital_relation: holds(
        sum(word.isupper() for word in _WORD.findall(text)), capital_relation, capital_frequency
    ),
    "change_case:english_capital": lambda text: text.isupper(),
    "change_case:english_lowercase": lambda text: text.islower(),
    "keywords:existence": lambda text, *, keywords: all(
        occurrences(text, word) for word in _listed(keywords)
    ),
    "keywords:forbidden_words": forbidden_words,
    "keywords:frequency": lambda text, *, keyword, frequency, relation: holds(
        occurrences(text, keyword), relation, frequency
    ),
    "keywords:letter_frequency": letter_frequency,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "length_constraints:number_paragraphs": number_of_paragraphs,
    "length_constraints:number_sentences": lambda text, *, num_sentences, relation: holds(
        count_sentences(text), relation, num_sentences
    ),
    "length_constraints:number_words": lambda text, *, num_words, relation: holds(
        len(_WORD.findall(text)), relation, num_words
    ),
    "punctuation:no_comma": lambda text: "," not in text,
}
"""IFEval's names and arguments."""
