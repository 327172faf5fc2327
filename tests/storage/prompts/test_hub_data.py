"""Data sets named as on the Hugging Face hub, from a cache as its library leaves it, without a network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

COMMIT = "c" * 40


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The cache of two data sets: one with directories of splits, one with its files in `data`."""
    hub = tmp_path / "home" / "hub"
    for name, files in {
        "org--nums": {"main/train-00000-of-00001.parquet": 3, "main/test-00000-of-00001.parquet": 2},
        "org--flat": {"data/train-00000-of-00002.parquet": 2, "data/train-00001-of-00002.parquet": 2},
    }.items():
        place = hub / f"datasets--{name}"
        (place / "refs").mkdir(parents=True)
        (place / "refs/main").write_text(COMMIT)
        for file, rows in files.items():
            path = place / "snapshots" / COMMIT / file
            path.parent.mkdir(parents=True, exist_ok=True)
            table = {"prompt": [f"{file}:{n}" for n in range(rows)], "label": ["x"] * rows}
            pyarrow.parquet.write_table(pyarrow.table(table), path)
    return tmp_path / "home"


def read(name: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Read prompts in a process of its own, since the hub's client reads its settings on import."""
    program = f"""
import json
from pathlib import Path
from storage.config import PromptKeys
from storage.prompts.dataset import load_prompts
print(json.dumps([prompt.content for prompt in load_prompts(Path({name!r}), PromptKeys())]))
"""
    own = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", program], env=os.environ | own, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "prompts"),
    [
        ("hf://org/nums/main/train", [f"main/train-00000-of-00001.parquet:{n}" for n in range(3)]),
        ("hf://org/nums@main/main/test", [f"main/test-00000-of-00001.parquet:{n}" for n in range(2)]),
        ("hf://org/nums/main/train@[1:2]", ["main/train-00000-of-00001.parquet:1"]),
        ("hf://org/flat", [f"data/train-0000{m}-of-00002.parquet:{n}" for m in range(2) for n in range(2)]),
        ("hf://org/flat/train@[-1:]", ["data/train-00001-of-00002.parquet:1"]),
    ],
)
def test_a_split_of_a_data_set_is_read_from_the_cache(name: str, prompts: list[str], home: Path):
    found = read(name, home)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == prompts


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hf://org/absent", ["hf://org/absent: the Hugging Face hub does not give", "a file or directory"]),
        ("hf://org/nums/main/validation", ["has no such split or file: there are test, train"]),
        ("hf://org/nums/other/train", ["has no such split or file: there are main"]),
        ("hf://nums", ["write a data set of the hub as hf://ORGANISATION/NAME[@REVISION][/SPLIT]"]),
    ],
)
def test_a_name_that_leads_nowhere_is_an_error_with_its_remedy(name: str, words: list[str], home: Path):
    said = read(name, home).stderr.splitlines()[-1]
    assert said.startswith("bus.errors.ConfigError: "), said
    assert all(word in said for word in words), said
