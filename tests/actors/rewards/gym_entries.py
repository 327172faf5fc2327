"""Writes prompts of reasoning-gym's data sets, and what their own answers score here, for another process.

    python -m tests.actors.rewards.gym_entries FILE COUNT [NAME ...]

COUNT prompts of each data set; of all that have default settings without a NAME."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

from bus.errors import ConfigError
from storage.built_in_tasks.reasoning_gym_tasks import asked_entry, data_set, exact_text, prompt_rows
from tests.actors.rewards.answers import answer

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
        found, read = asked_entry(row["metadata"], prompt_text=row["prompt"])
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


QUESTION = "What is 2 + 3?"
ENTRY = {"question": QUESTION, "answer": "5", "metadata": {"source_dataset": "chain_sum"}}
STORED = {"reasoning_gym": {"data_set": "chain_sum", "package": "0.1.25", "entry": exact_text(ENTRY)}}


def to(text, question=QUESTION, label="5", metadata=STORED):
    """An answer to a prompt of reasoning-gym."""
    return answer(text, label, messages=({"role": "user", "content": question},), metadata=metadata)


def row_answer(row, text):
    return to(text, row["prompt"], row["label"], row["metadata"])


def written_elsewhere(tmp_path, count, *names, timeout_s=280):
    """Prompts of data sets that another process has made, whose hashes have another seed."""
    path = tmp_path / "rows.json"
    asked = [sys.executable, "-m", "tests.actors.rewards.gym_entries", str(path), str(count), *names]
    subprocess.run(asked, check=True, timeout=timeout_s, env={**os.environ, "PYTHONHASHSEED": "1"})
    return json.loads(path.read_text())
