"""What recipes ask, and that their rewards know right answers from wrong ones."""

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache

import pytest

from actors.episodes.task import Answer
from actors.rewards.base import Scored
from actors.rewards.builtin.registry import REWARDS
from actors.tools.calculator import evaluated
from launch.recipes import instructions
from launch.recipes.prompt_files import PromptFiles, PromptRow
from launch.recipes.recipe import PROMPTS, recipe
from launch.settings.run_config import resolve
from storage.built_in_tasks.reasoning_gym_tasks import asked_entry, data_set

FOLLOWED: Mapping[str, Callable[[str, Mapping], str]] = {
    "change_case:english_lowercase": lambda topic, _: f"we all like {topic}.",
    "change_case:english_capital": lambda topic, _: f"WE ALL LIKE {topic.upper()}.",
    "change_case:capital_word_frequency": lambda topic, _: f"WE ALL LIKE {topic}.",
    "combination:two_responses": lambda topic, _: f"We like {topic}. ****** They like {topic}.",
    "detectable_content:number_placeholders": lambda topic, _: f"[name] likes {topic}.",
    "detectable_content:postscript": lambda topic, said: (
        f"We like {topic}.\n{said['postscript_marker']} All of them."
    ),
    "detectable_format:number_bullet_lists": lambda topic, said: f"* {topic}\n" * said["num_bullets"],
    "detectable_format:number_highlighted_sections": lambda topic, _: f"We like *{topic}*.",
    "detectable_format:title": lambda topic, _: f"<<On {topic}>> We like them.",
    "keywords:existence": lambda topic, said: f"We like {topic}, {said['keywords'][0]}.",
    "keywords:forbidden_words": lambda topic, _: f"We like {topic}.",
    "length_constraints:number_sentences": lambda topic, said: f"We like {topic}. " * said["num_sentences"],
    "length_constraints:number_words": lambda topic, _: f"We like {topic}.",
    "punctuation:no_comma": lambda topic, _: f"We like {topic}.",
    "startend:end_checker": lambda topic, said: f"We like {topic}. {said['end_phrase']}",
    "startend:quotation": lambda topic, _: f'"We like {topic}."',
}
IGNORED = (
    "Well, the rest and what is said here is nothing of what was asked, and [no more than that is to be had"
)
"""An answer that follows no instruction."""


SLOW = {"reasoning"}
"""Recipes whose prompts take seconds."""
HELD_OUT = {"sums": 35}
"""Fewest held-out prompts of a recipe that has less than 250."""


@lru_cache
def files_of(name: str) -> PromptFiles:
    return PROMPTS[name]()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in PROMPTS]
)
def test_no_prompt_is_held_out_and_trained_on(name):
    files = {kind: {json.dumps(row) for row in rows} for kind, rows in files_of(name).items()}
    assert len(files["heldout"]) >= HELD_OUT.get(name, 250)
    for kind in files.keys() - {"prompts"}:
        assert not files[kind] & files["prompts"]
    config = resolve(recipe(name).settings)
    assert {
        path.stem for path in (config.data.heldout, *(one.prompts for one in config.evaluation.sets))
    } == (files.keys() - {"prompts"})


def reward_of(row: PromptRow, text: str, reward: str) -> float:
    found = REWARDS[reward](
        Answer(
            text=text, label=row.get("label"), metadata=row.get("metadata", {}), messages=[],
            finish_reason="stop", token_count=1, task_id="t",
        )
    )  # fmt: skip
    return found.reward if isinstance(found, Scored) else found


def test_instructions_can_be_followed_and_are_told_when_they_are_not():
    files, reward = (
        files_of("instructions"),
        resolve(recipe("instructions").settings).actors.environment.reward,
    )
    for row in (row for rows in files.values() for row in rows):
        kind, said = row["metadata"]["instruction_id_list"][1], row["metadata"]["kwargs"][1]
        topic = row["metadata"]["kwargs"][0]["keywords"][0]
        assert reward_of(row, FOLLOWED[kind](topic, said), reward) == 1, row
        assert reward_of(row, f"{topic} {IGNORED}", reward) == 0, row
        assert reward_of(row, FOLLOWED[kind]("nothing", said), reward) == 0, row
    for arguments in (row["metadata"]["kwargs"][1] for row in files["prompts"]):
        assert all(isinstance(value, str | int | list) for value in arguments.values())


def test_new_kinds_and_topics_are_not_trained_on():
    kinds = {
        name: {row["metadata"]["instruction_id_list"][1] for row in rows}
        for name, rows in files_of("instructions").items()
    }
    assert kinds["heldout"] == kinds["prompts"]
    assert not kinds["new_kinds"] & kinds["prompts"]
    assert not set(instructions.TOPICS) & set(instructions.HELD_OUT_TOPICS)


def test_a_calculator_has_what_problems_ask():
    files = files_of("calculator")
    for row in (row for rows in files.values() for row in rows[:200]):
        *shown, question = row["prompt"]
        for call, result, answer in zip(shown[2::4], shown[3::4], shown[4::4], strict=True):
            [expression] = re.findall("<calculator>(.*)</calculator>", call["content"])
            assert result["content"] == f"<result>{evaluated(expression)}</result>"
            assert answer["content"] == str(evaluated(expression))
        b, a = sorted(map(int, re.findall(r"\d+", question["content"])))
        assert row["label"] in {str(evaluated(f"{a}{operator}{b}")) for operator in "+-*"}
        assert reward_of(row, f"It is {row['label']}.", "last_number") == 1
        assert reward_of(row, f"{a} and {b}", "last_number") == 0
    numbers = {
        name: {tuple(sorted(re.findall(r"\d+", row["prompt"][-1]["content"]))) for row in rows}
        for name, rows in files.items()
    }
    assert not numbers["prompts"] & (numbers["heldout"] | numbers["new_wordings"])


def test_the_prices_of_a_question_are_those_of_its_label():
    for rows in files_of("agent").values():
        for row in rows[:300]:
            prices = row["metadata"]["prices"]
            assert (
                str(sum(prices[thing] for thing in re.findall(r"the (\w+)", row["prompt"]))) == row["label"]
            )


@pytest.mark.slow
def test_questions_of_reasoning_gym_are_scored_by_its_verifier():
    for row in files_of("reasoning")["heldout"]:
        *shown, asked = (message["content"] for message in row["prompt"])
        assert asked not in shown
        name, entry = asked_entry(row["metadata"], prompt_text="\n".join((*shown, asked)))
        assert entry["question"] == asked
        verifier = data_set(name, 1, 0)
        assert verifier.score_answer(row["label"], entry) == 1
        assert verifier.score_answer("~", entry) < 0.5
