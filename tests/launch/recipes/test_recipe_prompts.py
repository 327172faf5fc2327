"""What recipes ask, and that their rewards know right answers from wrong ones."""

import json
import re

import pytest

from actors.rewards.base import Answer, Scored
from actors.rewards.registry import REWARDS
from actors.tools.calculator import evaluated
from launch.config import resolve
from launch.recipes.prompt_files import PromptRow
from launch.recipes.recipe import PROMPTS, recipe


@pytest.mark.parametrize("name", PROMPTS)
def test_no_prompt_is_held_out_and_trained_on(name):
    files = {kind: {json.dumps(row) for row in rows} for kind, rows in PROMPTS[name]().items()}
    assert len(files["heldout"]) >= 250
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


def test_a_calculator_has_what_problems_ask():
    files = PROMPTS["calculator"]()
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
