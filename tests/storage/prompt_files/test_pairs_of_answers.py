"""Pairs of answers are read in the forms in which TRL and the hub have them."""

import json
from pathlib import Path

import pytest

from bus.errors import ConfigError
from storage.prompt_files.pairs import load_pairs


def read(directory: Path, row: object) -> list[list]:
    path = directory / "pairs.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return [[(m["role"], m["content"], m.get("weight", 1)) for m in p.content] for p, _ in load_pairs(path)]


def said(*messages: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in messages]


ASKED = ("user", "1+1")
WRONG, RIGHT = ("assistant", "3"), ("assistant", "2")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1", "chosen": "2", "rejected": "3"},
        {"prompt": said(ASKED), "chosen": said(RIGHT), "rejected": said(WRONG)},
        {"messages": said(ASKED), "chosen": "2", "rejected": said(WRONG)},
        {"chosen": said(ASKED, RIGHT), "rejected": said(ASKED, WRONG)},
        {"prompt": "1+1", "chosen": said(ASKED, RIGHT), "rejected": said(ASKED, WRONG)},
    ],
)
def test_a_prompt_with_two_answers_is_two_chats(tmp_path: Path, row):
    asked = (*ASKED, 0)
    assert read(tmp_path, row) == [[asked, (*RIGHT, 1)], [asked, (*WRONG, 1)]]


def test_answers_before_the_two_are_not_trained_and_those_after_them_are(tmp_path: Path):
    begun, again = said(ASKED, WRONG, ("user", "sure?")), said(RIGHT, ("user", "why?"), ("assistant", "so"))
    row = {"chosen": begun + again, "rejected": begun + said(WRONG)}
    of_prompt = [(*ASKED, 0), (*WRONG, 0), ("user", "sure?", 0)]
    chosen, rejected = read(tmp_path, row)
    assert chosen == [*of_prompt, (*RIGHT, 1), ("user", "why?", 1), ("assistant", "so", 1)]
    assert rejected == [*of_prompt, (*WRONG, 1)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "line 1: no key 'rejected'"),
        ({"chosen": "b", "rejected": "c"}, "line 1: no key 'prompt'"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "line 1: 'rejected' is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, "line 1: 'rejected' is a number"),
        (
            {"chosen": said(ASKED), "rejected": said(ASKED, WRONG)},
            "line 1: 'chosen' has no message with the role 'assistant' behind the prompt",
        ),
        (
            {"prompt": "a", "chosen": [{"role": "assistant", "content": "b", "weight": 0}], "rejected": "c"},
            "line 1: 'chosen' has no message .* or with a weight of 0 alone",
        ),
        (
            {"chosen": said(("user", "a"), RIGHT), "rejected": said(("user", "b"), WRONG)},
            "line 1: the chats 'chosen' and 'rejected' begin with other messages",
        ),
        (
            {"prompt": "1+1", "chosen": said(ASKED, RIGHT), "rejected": "3"},
            "line 1: 'chosen' is a whole chat, 'rejected' the answer alone: give both as whole chats",
        ),
    ],
)
def test_a_bad_pair_is_reported_with_its_line(tmp_path: Path, row, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, row)
