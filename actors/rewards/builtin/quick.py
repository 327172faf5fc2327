"""Quick rewards without settings, which look at the text alone."""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from string import ascii_uppercase

from actors.episodes.draws import uniform_draw
from actors.episodes.task import Answer
from actors.rewards.base import RewardError, Scored, label_of, without_working
from actors.rewards.final_text import last_boxed, without_reasoning

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def exact(answer: Answer) -> float:
    """Score 1 for an answer that is the label and nothing else, and that the policy ended by itself."""
    wanted = label_of(answer).strip()
    return float(answer.finish_reason == "stop" and answer.text.strip() == wanted)


def last_number(answer: Answer) -> float:
    """Score 1 when the last number in the text equals the label as a number: 1,200.50 is 1200.5. Of a label
    such as GSM8K's, only what follows its last `####` counts."""
    wanted, numbers = _label_number(answer), NUMBER.findall(answer.text)
    return float(bool(numbers) and _number(numbers[-1]) == wanted)


def final_answer(answer: Answer) -> float:
    """Score 1 when the text after the last `=` equals the label's and the policy ended the answer itself."""
    wanted, found = (text.rpartition("=")[2].strip() for text in (label_of(answer), answer.text))
    return float(answer.finish_reason == "stop" and found == wanted)


def contains(answer: Answer) -> float:
    """Score 1 when the label occurs in the text."""
    return float(label_of(answer) in answer.text)


def _label_number(answer: Answer) -> Decimal:
    label = label_of(answer)
    try:
        number = _number(without_working(label))
    except InvalidOperation:
        number = Decimal("nan")
    if not number.is_finite():
        raise RewardError(
            f"task {answer.task_id}: the label {label[-200:]!r} is not a number, as last_number needs: "
            "give a number, or GSM8K's form `... #### 72`"
        )
    return number


def _number(text: str) -> Decimal:
    return Decimal(text.strip().replace(",", ""))


def sandbox_check(answer: Answer) -> float:
    """Return what the check of the settings gives for what the answer's episode left, 1 where it passes."""
    given = answer.metadata.get("sandbox_check")
    return float(given) if isinstance(given, int | float) else 0.0


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
    """Score the harmonic mean of precision and recall of the words in the text, in [0, 1]. Words count as
    often as they occur. `yes`, `no` and `noanswer` are compared as a whole."""
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


LAST_CHARACTERS = 300
"""Characters at the end of a text in which its answer is looked for."""
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_WRAPPED = re.compile(r"\\(?:boxed|fbox|text|textbf|mathrm|mathbf|overline|mbox)\s*\{([^{}]*)\}")
_DROPPED = re.compile(r"\\[!;, ]|\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\?%|[\s*$\"]")
_UNIT = re.compile(r"(?<=\d)[a-zA-Z]+$")
_GROUPED = re.compile(r"-?\d{1,3}(?:(?:,|\{,\})\d{3})+")


def dapo(answer: Answer) -> Scored:
    """Score 1 if the last `Answer: ...` in the last 300 characters is the label, a whole number; else -1.
    What surrounds the number (`$`, boxes, spaces, separators of thousands, a unit, a full stop, an equation's
    left side) does not count. The part `accuracy` is 1 or 0."""
    label, found = str(_whole_label(answer)), _ANSWER.findall(answer.text[-LAST_CHARACTERS:])
    correct = bool(found) and _normalised(found[-1]) == label
    return Scored(1.0 if correct else -1.0, {"accuracy": float(correct)})


def _whole_label(answer: Answer) -> int:
    """Return the label, cut to a whole number. Raises RewardError for one that is none."""
    label = _normalised(without_working(label_of(answer)))
    try:
        return int(Decimal(label))
    except (InvalidOperation, ValueError, OverflowError) as error:
        raise RewardError(
            f"task {answer.task_id}: the label {answer.label!r} is not a number, as the reward dapo needs"
        ) from error


def _normalised(text: str) -> str:
    while (unwrapped := _WRAPPED.sub(r"\1", text)) != text:
        text = unwrapped
    text = _DROPPED.sub("", text).rpartition("=")[2].rstrip(".,;")
    if _GROUPED.fullmatch(text):
        text = text.replace("{,}", "").replace(",", "")
    return _UNIT.sub("", text)


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


HALF_LENGTH = 16
"""Length of an answer to which `length` gives 1/2."""


def random_reward(answer: Answer) -> float:
    """Draw a number in (0, 1) by the name of the rollout, whatever the answer says."""
    return uniform_draw(f"random reward/{answer.task_id}")


def length(answer: Answer) -> float:
    """Prefer short answers: 1 for none, 1/2 for one of 16 tokens. Characters stand for tokens where the
    answer does not tell how many it has."""
    found = answer.token_count or len(answer.text)
    return HALF_LENGTH / (HALF_LENGTH + found)
