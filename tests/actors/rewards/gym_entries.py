"""Writes prompts of reasoning-gym's data sets, and what their own answers score here, for another process.

    python -m tests.actors.rewards.gym_entries FILE COUNT [NAME ...]

COUNT prompts of each data set; of all that have default settings without a NAME."""

import json
import sys
import warnings
from pathlib import Path

from bus.errors import ConfigError
from storage.built_in_tasks.reasoning_gym_tasks import asked_entry, data_set, prompt_rows

SEED = 5


def rows_of(name: str, count: int) -> list[dict]:
    """The rows of a data set, with the score of each entry's own answer."""
    drawn = data_set(name, 2 * count, SEED)
    by_question: dict[str, dict] = {}
    for index in range(2 * count):
        by_question.setdefault(drawn[index]["question"], drawn[index])
    rows = []
    for row in prompt_rows(name, size=count, seed=SEED):
        entry = by_question[row["prompt"]]
        found, read = asked_entry(row["metadata"], label=row["label"], prompt_text=row["prompt"])
        assert found == name
        score = float(drawn.score_answer(answer="" if row["label"] is None else row["label"], entry=entry))
        rows.append({**row, "score": score, "same": read == entry})
    return rows


def written(names: list[str], count: int) -> dict[str, list[dict] | str]:
    """The rows of each data set, or why it has none."""
    found = {}
    for name in names:
        try:
            found[name] = rows_of(name, count)
        except ConfigError as error:
            found[name] = str(error)
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    path, count, *asked = sys.argv[1:]
    from reasoning_gym.factory import DATASETS

    Path(path).write_text(json.dumps(written(asked or sorted(DATASETS), int(count))))
