"""Prompts that stay on disk: read once, the same as ever, found again after a restart without reading."""

import json
import os
import tempfile
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bus.errors import ConfigError, LostDataError, StorageError
from bus.messages import Prompt
from storage.prompt_files.dataset import load_prompts, refuse_large
from storage.prompt_files.stored_prompts import digest_of, open_stored, store_prompts
from storage.prompts import run_prompts as reading
from storage.prompts.run_prompts import training_prompts
from storage.settings.data import PromptKeys, SourceConfig
from tests.pictures import image_part, picture

KEYS = PromptKeys()
PROMPTS = [Prompt(content=f"é {n}" * (1 + n % 3), label=str(n), metadata={"level": n % 3}) for n in range(40)]


def rows():
    return [{"prompt": p.content, "label": p.label, "metadata": p.metadata} for p in PROMPTS]


def jsonl(directory: Path) -> Path:
    path = directory / "train.jsonl"
    path.write_text("\n\n".join(map(json.dumps, rows())))
    return path


def parquet(directory: Path) -> Path:
    path = directory / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows()), path, row_group_size=7)
    return path


def arrow(directory: Path) -> Path:
    (directory / "saved").mkdir()
    table = pa.Table.from_pylist(rows())
    for n in range(2):  # as datasets writes shards
        with (
            (directory / f"saved/data-0000{n}-of-00002.arrow").open("wb") as file,
            pa.ipc.new_stream(file, table.schema) as stream,
        ):
            stream.write_table(table.slice(n * 25, 25), max_chunksize=4)
    return directory / "saved"


@pytest.mark.parametrize("write", [jsonl, parquet, arrow])
def test_prompts_on_disk_are_those_of_the_file_one_by_one_and_in_order(tmp_path, write, monkeypatch):
    monkeypatch.setattr("storage.prompt_files.rows.BATCH_ROWS", 3)
    stored, sources = training_prompts(write(tmp_path), KEYS, tmp_path / "run")
    assert (list(stored), len(stored), sources) == (PROMPTS, 40, ())
    assert [stored[n] for n in (0, 39, 7, -1)] == [PROMPTS[n] for n in (0, 39, 7, -1)]
    assert stored[5:9] == PROMPTS[5:9]
    assert stored.digest == digest_of(PROMPTS)
    with pytest.raises(IndexError):
        stored[40]


@pytest.mark.parametrize("write", [jsonl, parquet, arrow])
@pytest.mark.parametrize("bounds", ["3:", ":4", "-4:", "30:-2", "-8:-3", ":-39", "2:7"])
def test_slices_are_those_of_a_list(tmp_path, write, bounds):
    start, stop = (int(bound) if bound else None for bound in bounds.split(":"))
    assert load_prompts(Path(f"{write(tmp_path)}@[{bounds}]"), KEYS) == PROMPTS[start:stop]


def test_a_bad_row_before_a_slice_is_not_looked_at(tmp_path):
    path = jsonl(tmp_path)
    path.write_text("{oops\n" + path.read_text())
    assert load_prompts(Path(f"{path}@[1:]"), KEYS) == load_prompts(Path(f"{path}@[-40:]"), KEYS) == PROMPTS


def test_buckets_follow_one_another_as_their_names_do(tmp_path):
    first = SourceConfig(name="a", prompts=jsonl(tmp_path), weight=2, buckets="level", reward="math")
    second = SourceConfig(name="b", prompts=parquet(tmp_path), weight=1)
    stored, sources = training_prompts([first, second], KEYS, tmp_path / "run")
    levels = [[p for p in PROMPTS if p.metadata["level"] == level] for level in range(3)]
    chosen = [
        Prompt(content=p.content, label=p.label, metadata={"reward": "math", **p.metadata})
        for p in chain.from_iterable(levels)
    ]
    assert list(stored) == [*chosen, *PROMPTS]
    assert [(one.name, one.count) for one in sources] == [("a=0", 14), ("a=1", 13), ("a=2", 13), ("b", 40)]
    assert [one.digest for one in sources] == [
        digest_of(stored[:14]), digest_of(stored[14:27]), digest_of(stored[27:40]), digest_of(PROMPTS)
    ]  # fmt: skip
    assert [one.weight for one in sources] == pytest.approx([2 * 14 / 40, 2 * 13 / 40, 2 * 13 / 40, 1])
    assert training_prompts([first, second], KEYS, tmp_path / "run")[1] == sources  # as they were noted


def test_buckets_are_divided_in_the_runs_directory_and_leave_nothing_there(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "memory-that-is-too-small"))
    left = tmp_path / "run/.tmp-buckets-killed"
    left.mkdir(parents=True)
    (left / "0").write_bytes(b"half")
    source = SourceConfig(name="a", prompts=jsonl(tmp_path), weight=2, buckets="level")
    stored, _ = training_prompts([source], KEYS, tmp_path / "run")
    assert len(stored) == len(PROMPTS)
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith(".tmp-")]


def test_a_restart_reads_nothing_unless_a_file_or_what_is_asked_has_changed(tmp_path, monkeypatch):
    reads, read = [], reading.each_prompt
    monkeypatch.setattr(reading, "each_prompt", lambda *asked: reads.append(asked) or read(*asked))
    path, run = jsonl(tmp_path), tmp_path / "run"

    def again(keys=KEYS):
        return list(training_prompts(path, keys, run)[0])

    assert again() == again() == PROMPTS
    assert len(reads) == 1
    again(PromptKeys(tools=""))  # other keys
    assert len(reads) == 2
    text = path.read_text()
    path.write_text(text.replace('"39"', '"93"', 1))  # as long as before
    assert again()[39].label == "93"
    assert len(reads) == 3
    [copy] = [file for file in run.glob("prompts-*.jsonl") if '"93"' in file.read_text()]
    copy.unlink()
    assert again()[39].label == "93"
    assert len(reads) == 4


@pytest.mark.parametrize("several", [False, True])
def test_a_restart_reads_again_where_the_file_of_an_image_has_changed(tmp_path, several):
    part = {"type": "image", "image": "a.png"}
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"prompt": [{"role": "user", "content": [part]}]}))
    where = [SourceConfig(name="a", prompts=path)] if several else path

    def shown(data: bytes):
        (tmp_path / "a.png").write_bytes(data)
        [prompt], _ = training_prompts(where, KEYS, tmp_path / "run")
        return prompt.content[0]["content"]

    for seed in range(2):
        assert shown(picture(seed=seed)) == [image_part(picture(seed=seed))]


def test_a_copy_without_a_fitting_index_is_read_once_and_must_be_the_same(tmp_path):
    stored = store_prompts(PROMPTS, tmp_path)
    [index] = tmp_path.glob("*.index.npy")
    for spoil in (index.unlink, lambda: index.write_bytes(b"\x93NUMPY"), lambda: os.utime(stored.path)):
        spoil()
        assert list(open_stored(tmp_path, stored.digest, source="it")) == PROMPTS
        assert np.load(index)[5:].tolist() == stored._offsets.tolist()
    index.unlink()
    open_stored(tmp_path, stored.digest, source="it", save_index=False)
    assert not index.exists()
    stored.path.write_text(stored.path.read_text().replace('"39"', '"93"'))
    with pytest.raises(LostDataError, match="is not the copy of the file that it was: restore it"):
        open_stored(tmp_path, stored.digest, source="the file")
    stored.path.write_text("half a li")
    with pytest.raises(LostDataError, match="is not the copy of the file that it was: restore it"):
        open_stored(tmp_path, stored.digest, source="the file")
    stored.path.unlink()
    with pytest.raises(StorageError, match=r"the copy of the file cannot be read .*no such file"):
        open_stored(tmp_path, stored.digest, source="the file")


def test_a_bad_row_leaves_no_copy(tmp_path):
    path, run = jsonl(tmp_path), tmp_path / "run"
    path.write_text(path.read_text() + "\n{oops\n")
    with pytest.raises(ConfigError, match="line 80: not JSON"):
        training_prompts(path, KEYS, run)
    assert not [file for file in run.iterdir() if file.suffix == ".jsonl"]


def test_the_largest_prompt_is_known_without_reading_all(tmp_path, monkeypatch):
    stored = store_prompts([*PROMPTS, Prompt(content="x" * 5000)], tmp_path)
    with pytest.raises(ConfigError, match=r"here: prompt 41 has 50\d\d bytes"):
        refuse_large(stored, "here", largest_message=5000)
    monkeypatch.setattr(type(stored), "__iter__", None)
    refuse_large(stored, "here", largest_message=1 << 20)


def test_a_prompt_whose_file_was_cut_while_it_is_used_says_so(tmp_path):
    stored = store_prompts(PROMPTS, tmp_path)
    os.truncate(stored.path, 100)
    assert stored[0] == PROMPTS[0]
    with pytest.raises(LostDataError, match=r"prompts-.*\.jsonl is no longer whole .*: restore it"):
        stored[39]
