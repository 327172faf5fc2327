"""Reward of instructions that a program can verify, in the manner and the data format of IFEval
(arXiv:2311.07911) and IFBench (arXiv:2507.02833)."""

import json
import re
from collections.abc import Callable, Mapping, Sequence

from actors.episodes.task import JSON, Answer
from actors.rewards.base import RewardError, Scored
from actors.rewards.final_text import without_reasoning
from actors.rewards.instructions.ifbench_form import FORM_CHECKS
from actors.rewards.instructions.ifbench_words import WORD_CHECKS
from actors.rewards.instructions.words import TEXT_CHECKS, holds
from bus.errors import nearest

_FENCE = re.compile(r"\A```(?:json)?+(.*)```\Z", re.DOTALL | re.IGNORECASE)
_BULLET = re.compile(r"^[^\S\n]*+(?:\*(?!\*)|-(?!-)|[+•])\s*+\S.*$", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*\*([^*\n]+)\*\*|\*([^*\n]+)\*")
CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
RESPONSES = "******"
"""What separates two answers."""


def is_json(text: str) -> bool:
    """The whole text is JSON, in a fenced block or not."""
    text = text.strip()
    fenced = _FENCE.match(text)
    try:
        json.loads(fenced[1].strip() if fenced else text)
    except (ValueError, RecursionError):
        return False
    return True


def number_of_highlights(text: str, *, num_highlights: int) -> bool:
    """At least so many parts are *highlighted* or **so**."""
    found = [single or double for double, single in _HIGHLIGHT.findall(text)]
    return sum(bool(part.strip()) for part in found) >= num_highlights


def has_postscript(text: str, *, postscript_marker: str) -> bool:
    """A line begins with the marker of a postscript, such as `P.S.`; spaces within it do not count."""
    marker = r"\s?".join(re.escape(letter) for letter in postscript_marker if not letter.isspace())
    if not marker:
        raise ValueError("the marker of the postscript is empty")
    return re.search(rf"^[^\S\n]*+{marker}", text, re.IGNORECASE | re.MULTILINE) is not None


def two_responses(text: str) -> bool:
    """Two different answers are separated by `******`."""
    parts = [part.strip() for part in text.split(RESPONSES)]
    found = [part for part in parts if part]
    return len(found) == 2 and found[0] != found[1] and all(parts[1:-1])


def is_quoted(text: str) -> bool:
    """The whole answer is in double quotation marks."""
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


CHECKS: Mapping[str, Callable[..., bool]] = {
    "combination:repeat_prompt": lambda text, *, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "combination:two_responses": two_responses,
    "detectable_content:number_placeholders": lambda text, *, num_placeholders: holds(
        len(re.findall(r"\[[^\[\]]+\]", text)), "at least", num_placeholders
    ),
    "detectable_content:postscript": has_postscript,
    "detectable_format:constrained_response": lambda text: any(allowed in text for allowed in CONSTRAINED),
    "detectable_format:json_format": is_json,
    "detectable_format:multiple_sections": lambda text, *, section_spliter, num_sections: (
        len(re.findall(rf"(?<!\w){re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections
    ),
    "detectable_format:number_bullet_lists": lambda text, *, num_bullets: (
        len(_BULLET.findall(text)) == num_bullets
    ),
    "detectable_format:number_highlighted_sections": number_of_highlights,
    "detectable_format:title": lambda text: any(
        title.strip() for title in re.findall(r"<<([^<>\n]+)>>", text)
    ),
    "startend:end_checker": lambda text, *, end_phrase: (
        text.strip().strip('"').strip().lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": is_quoted,
    **TEXT_CHECKS,
    **WORD_CHECKS,
    **FORM_CHECKS,
}
"""The names and arguments of IFEval and IFBench. `language:response_language` is left out: it needs a
detector."""
CONTROL = "These are a few words, and no instruction is told to them."
"""Text on which each check works whose arguments can be read."""


def instructions(answer: Answer) -> Scored:
    """Score 1 if the answer, after its reasoning, follows every instruction of its prompt; else 0.

    The metadata hold `instruction_id_list` and `kwargs` as IFEval's data do. The part `followed` is the share
    of instructions that are followed. An empty answer follows none, and neither does one that makes a check
    fail which works on another text. Raises RewardError for instructions that cannot be checked."""
    text, given = without_reasoning(answer.text), _given(answer)
    for name, arguments in given:
        _refuse_unreadable(answer, name, arguments)
    followed = [bool(text.strip()) and _follows(text, name, arguments) for name, arguments in given]
    return Scored(float(all(followed)), {"followed": sum(followed) / len(followed)})


def _given(answer: Answer) -> list[tuple[str, Mapping[str, JSON]]]:
    names, arguments = answer.metadata.get("instruction_id_list"), answer.metadata.get("kwargs")
    if isinstance(names, str) or not isinstance(names, Sequence) or not names:
        raise RewardError(
            f"task {answer.task_id} has no instructions to check: give metadata.instruction_id_list as a list"
        )
    if arguments is None:
        arguments = [{}] * len(names)
    if isinstance(arguments, str) or not isinstance(arguments, Sequence) or len(arguments) != len(names):
        raise RewardError(
            f"task {answer.task_id}: metadata.kwargs is to be a list with one object for each of the "
            f"{len(names)} instructions"
        )
    return [(str(name), _present(one, answer)) for name, one in zip(names, arguments, strict=True)]


def _present(arguments: JSON, answer: Answer) -> Mapping[str, JSON]:
    """Leave out arguments that are null: tables give every row the columns of all."""
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise RewardError(f"task {answer.task_id}: {arguments!r} in metadata.kwargs is no object")
    return {name: value for name, value in arguments.items() if value is not None}


def _follows(text: str, name: str, arguments: Mapping[str, JSON]) -> bool:
    try:
        return CHECKS[name](text, **arguments)
    except (TypeError, ValueError, AttributeError, RecursionError):  # the check works on CONTROL
        return False


def _refuse_unreadable(answer: Answer, name: str, arguments: Mapping[str, JSON]) -> None:
    """Raise RewardError for an instruction that is unknown, or cannot be checked on any text."""
    check = CHECKS.get(name)
    if check is None:
        hint = nearest(name, CHECKS).strip() or f"known are {', '.join(CHECKS)}"
        raise RewardError(f"task {answer.task_id}: no instruction is named {name!r}: {hint}")
    try:
        check(CONTROL, **arguments)
    except (TypeError, ValueError, AttributeError) as error:
        reason = str(error).removeprefix("<lambda>() ")
        raise RewardError(
            f"task {answer.task_id}: the instruction {name!r} cannot be checked: {reason}"
        ) from error
