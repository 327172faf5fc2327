"""Rewards of short answers to questions, compared by words as SQuAD does (arXiv:1606.05250, section 6.1)."""

import re
import string
from collections import Counter

from actors.episodes.task import Answer
from actors.rewards.base import RewardError, label_of
from actors.rewards.final_text import without_reasoning

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
DECISIONS = frozenset({"yes", "no", "noanswer"})
"""Answers that are right or wrong as a whole: words in common mean nothing."""
ALTERNATIVES = "answers"
"""Field of a task's metadata with further right answers; the best of them counts."""


def exact_match(answer: Answer) -> float:
    """Score 1 for a text that is a right answer but for case, punctuation, articles and spaces."""
    text = normalised(without_reasoning(answer.text))
    return float(any(text == normalised(label) for label in _labels(answer)))


def f1(answer: Answer) -> float:
    """Score the harmonic mean of precision and recall of the words in the text, in [0, 1].

    Words count as often as they occur. `yes`, `no` and `noanswer` are compared as a whole."""
    text = normalised(without_reasoning(answer.text))
    return max(_f1(text, normalised(label)) for label in _labels(answer))


def normalised(text: str) -> str:
    """Return the words in lower case, without punctuation and articles, separated by single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _f1(text: str, label: str) -> float:
    if text == label:
        return 1.0
    if DECISIONS & {text, label}:
        return 0.0
    words, wanted = Counter(text.split()), Counter(label.split())
    common = (words & wanted).total()
    return 2 * common / (words.total() + wanted.total()) if common else 0.0


def _labels(answer: Answer) -> list[str]:
    """Return the right answers. Raises RewardError where there is none."""
    others = answer.metadata.get(ALTERNATIVES)
    if others is None:
        return [label_of(answer)]
    if not isinstance(others, list | tuple) or not others or not all(isinstance(one, str) for one in others):
        raise RewardError(
            f"task {answer.task_id}: {ALTERNATIVES!r} in its metadata is {others!r}: give a list of texts"
        )
    return [*([answer.label] if answer.label is not None else []), *map(str, others)]
