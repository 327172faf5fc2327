"""Reward of instructions that a program can verify, in the manner and the data format of IFEval
(arXiv:2311.07911) and IFBench (arXiv:2507.02833)."""

import difflib
from collections.abc import Callable, Mapping, Sequence

from actors.episodes.task import JSON, Answer
from actors.rewards.base import RewardError, Scored
from actors.rewards.final_text import without_reasoning
from actors.rewards.instructions import form, words
from actors.rewards.instructions.ifbench_form import FORM_CHECKS
from actors.rewards.instructions.ifbench_words import WORD_CHECKS

CHECKS: Mapping[str, Callable[..., bool]] = {
    "change_case:capital_word_frequency": words.capital_word_frequency,
    "change_case:english_capital": words.all_capital,
    "change_case:english_lowercase": words.all_lowercase,
    "combination:repeat_prompt": form.repeats_prompt,
    "combination:two_responses": form.two_responses,
    "detectable_content:number_placeholders": form.number_of_placeholders,
    "detectable_content:postscript": form.has_postscript,
    "detectable_format:constrained_response": form.constrained,
    "detectable_format:json_format": form.is_json,
    "detectable_format:multiple_sections": form.number_of_sections,
    "detectable_format:number_bullet_lists": form.number_of_bullets,
    "detectable_format:number_highlighted_sections": form.number_of_highlights,
    "detectable_format:title": form.has_title,
    "keywords:existence": words.keywords_exist,
    "keywords:forbidden_words": words.forbidden_words,
    "keywords:frequency": words.keyword_frequency,
    "keywords:letter_frequency": words.letter_frequency,
    "length_constraints:nth_paragraph_first_word": words.nth_paragraph_first_word,
    "length_constraints:number_paragraphs": words.number_of_paragraphs,
    "length_constraints:number_sentences": words.number_of_sentences,
    "length_constraints:number_words": words.number_of_words,
    "punctuation:no_comma": words.no_comma,
    "startend:end_checker": form.ends_with,
    "startend:quotation": form.is_quoted,
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
        close = difflib.get_close_matches(name, CHECKS, 1)
        hint = f": did you mean {close[0]!r}?" if close else f"; known are {', '.join(CHECKS)}"
        raise RewardError(f"task {answer.task_id}: no instruction is named {name!r}{hint}")
    try:
        check(CONTROL, **arguments)
    except (TypeError, ValueError, AttributeError) as error:
        raise RewardError(
            f"task {answer.task_id}: the instruction {name!r} cannot be checked: {error}"
        ) from error
