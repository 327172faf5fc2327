"""Every data set of reasoning-gym: entries survive the way to another process, and no words break it."""

import asyncio

import pytest

from actors.rewards.base import Scored
from actors.rewards.scoring.scorers import Scorer
from actors.settings.rewards import RewardConfig
from tests.actors.rewards.gym_entries import row_answer, written_elsewhere

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
ENTRIES = 5
WITHOUT_DEFAULTS = {"composite"}
"""Data sets that the package cannot make without settings."""
ODD = [
    "", "garbage", "x" * 5000, "[[1,2],[3]]", "[" * 3000, "{", "None", "9**9**9**9**9", "\x00", "-1", "1/0",
    '{"a": 1}', "nan", "1e999", "() () ()", "2 \u00d7 x", "[{}]", '{"agent": 5}', "[5]", "a,b,c \u00e9",
]  # fmt: skip


async def test_right_answers_score_as_in_the_process_that_made_their_entries_and_odd_ones_never_fail(
    tmp_path,
):
    found = written_elsewhere(tmp_path, ENTRIES, timeout_s=900)
    assert {name for name, rows in found.items() if isinstance(rows, str)} == WITHOUT_DEFAULTS
    scorer = Scorer.from_config("reasoning_gym", RewardConfig(reward="reasoning_gym", reward_timeout_s=20))
    wrong = []
    try:
        for name in found.keys() - WITHOUT_DEFAULTS:
            rows = found[name]
            own = [f"<answer>{row['label'] or ''}</answer>" for row in rows]
            plain = [row["label"] or "" for row in rows]
            texts = [
                text if label == label.strip() else label for text, label in zip(own, plain, strict=True)
            ]
            answers = [row_answer(row, text) for row, text in zip(rows, texts, strict=True)]
            scores = await asyncio.gather(*map(scorer.score, answers))
            if not all(row["same"] for row in rows) or scores != [row["score"] for row in rows]:
                wrong.append((name, scores, [row["score"] for row in rows]))
            odd = await asyncio.gather(*(scorer.scored(row_answer(rows[0], text)) for text in ODD))
            assert all(isinstance(one, Scored) for one in odd), name
    finally:
        await scorer.close()
    assert wrong == []
