"""The export of trajectories, read back by pyarrow and, in an environment of its own, by `datasets`."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest

from bus.errors import ConfigError
from launch.trajectories import export
from launch.trajectories.held_out import HeldOutTrajectories
from launch.trajectories.search import TrajectoryFilter
from launch.trajectories.sources import StoredTrajectories
from storage.disk.run_directory import RunDirectory
from tests.launch.dashboard.run_on_disk import (
    GROUPS_A_STEP,
    SAMPLES,
    make_run,
    two_turns,
    write_held_out_answers,
)

EVERYTHING = 3 * GROUPS_A_STEP * SAMPLES


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    run = make_run(tmp_path_factory.mktemp("runs"), "done", steps=5)
    write_held_out_answers(run, 3)
    write_held_out_answers(run, 5, "aime")
    return run


async def exported(run: RunDirectory, path: Path, *, token_ids: bool = False, **wanted: object) -> int:
    source, chosen = StoredTrajectories(run), TrajectoryFilter(**wanted)
    return await export.export_run(source, chosen, path, asyncio.Event(), token_ids=token_ids)


async def test_lines_and_parquet_say_the_same(stored: RunDirectory, tmp_path: Path):
    lines, table = tmp_path / "all.jsonl", tmp_path / "all.parquet"
    assert await exported(stored, lines, token_ids=True) == EVERYTHING
    assert await exported(stored, table, token_ids=True) == EVERYTHING
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    read = pyarrow.parquet.read_table(table).to_pylist()
    assert [
        one | {name: json.loads(one[name]) for name in ("metadata", "reward_components")} for one in read
    ] == rows
    assert [one["trajectory_id"] for one in rows] == [
        f"g{n:08}.{m}" for n in range(12) for m in range(SAMPLES)
    ]
    found, t = rows[15], two_turns(7, 1, 4)
    assert (found["prompt"], found["label"]) == ("<|user|> sort 4 1 3 <|assistant|> ", "label 2")
    assert found["answer"].startswith("the smallest of them is one , then three and four")
    assert (found["reward"], found["advantage"], found["reward_components"]) == (1.0, 0.5, {"format": 1.0})
    ratios = {"importance_ratio": 2.75, "importance_ratio_min": 0.25, "importance_ratio_max": 4.0}
    assert found.items() >= (ratios | {"truncated_fraction": 0.125}).items()
    assert (found["step"], found["weight"], found["training"]) == (4, 1.0, "trained in step 4 with weight 1")
    assert (found["task"], found["metadata"]) == ("task-7", {"id": "task-7"})
    assert (found["token_ids"], found["loss_mask"]) == (t.token_ids.tolist(), t.loss_mask.tolist())
    assert found["behaviour_logprobs"] == t.behaviour_logprobs.tolist()


async def test_filters_choose_the_rows(stored: RunDirectory, tmp_path: Path):
    assert await exported(stored, tmp_path / "some.jsonl", step=4, least_reward=1.0) == GROUPS_A_STEP
    rows = [json.loads(line) for line in (tmp_path / "some.jsonl").read_text().splitlines()]
    assert [one["trajectory_id"] for one in rows] == [f"g{n:08}.1" for n in range(4, 8)]
    assert "token_ids" not in rows[0]
    assert await exported(stored, tmp_path / "drifted.jsonl", least_ratio=3.5, most_ratio=3.6) == 1
    assert json.loads((tmp_path / "drifted.jsonl").read_text())["trajectory_id"] == "g00000010.1"
    assert await exported(stored, tmp_path / "none", text="nowhere") == 0
    assert pyarrow.parquet.read_table(tmp_path / "none").num_rows == 0


async def test_answers_to_held_out_prompts_are_apart_and_say_what_they_are(
    stored: RunDirectory, tmp_path: Path
):
    source, stop = HeldOutTrajectories(stored), asyncio.Event()
    for path in (tmp_path / "held.jsonl", tmp_path / "held.parquet"):
        assert await export.export_run(source, TrajectoryFilter(), path, stop) == 8
    read = pyarrow.parquet.read_table(tmp_path / "held.parquet").to_pylist()
    rows = [json.loads(line) for line in (tmp_path / "held.jsonl").read_text().splitlines()]
    names = (
        "trajectory_id", "label", "reward", "held_out", "greedy", "evaluated_version", "data_set", "trained",
    )  # fmt: skip
    told = [[row[name] for name in names] for row in rows]
    assert told == [[row[name] for name in names] for row in read]
    assert told[:2] == [
        ["h00000001.0", "1 3 4", 0.0, True, False, 3, "heldout", False],
        ["h00000001.1", "1 3 4", 1.0, True, True, 3, "heldout", False],
    ]
    assert rows[0]["training"] == "held out of training, evaluated at version 3 on heldout, sampled"
    assert rows[7]["training"] == "held out of training, evaluated at version 5 on aime, greedy"
    assert (rows[0]["oldest_version"], rows[0]["newest_version"], rows[0]["masked_tokens"]) == (3, 4, 0)
    assert (rows[0]["step"], rows[0]["weight"], rows[0]["advantage"]) == (None, None, None)
    wanted = TrajectoryFilter(data_set="aime", least_reward=1.0, text="SMALLEST")
    assert await export.export_run(source, wanted, tmp_path / "some.jsonl", stop) == 2
    assert await exported(stored, tmp_path / "trained.jsonl", data_set="aime") == 0
    for filters in ({"step": 4}, {"recorded": True}, {"least_ratio": 1.0}):
        with pytest.raises(ConfigError, match=r"leave (them )?out"):
            await export.export_run(source, TrajectoryFilter(**filters), tmp_path / "no.jsonl", stop)


async def test_what_the_learner_made_of_many_groups_is_read_once(stored: RunDirectory, tmp_path: Path):
    source, asked = StoredTrajectories(stored), []

    class Counting(StoredTrajectories):
        async def training(self, leases):
            asked.append(list(leases))
            return await source.training(asked[-1])

    lines, stop = tmp_path / "all.jsonl", asyncio.Event()
    assert await export.export_run(Counting(stored), TrajectoryFilter(), lines, stop) == EVERYTHING
    assert asked == [list(range(EVERYTHING // SAMPLES))]
    assert len({json.loads(line)["training"] for line in lines.read_text().splitlines()}) == 3  # of each step


async def test_a_path_that_cannot_be_is_refused_and_what_is_not_whole_is_not_left(
    stored: RunDirectory, tmp_path: Path
):
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="there exists already: give another path"):
        await exported(stored, tmp_path / "there")
    with pytest.raises(ConfigError, match=r"all\.csv: it ends in \.jsonl or \.parquet"):
        await exported(stored, tmp_path / "all.csv")
    stop = asyncio.Event()
    stop.set()
    for name in ("all.jsonl", "all.parquet", "all"):
        with pytest.raises(ConfigError, match=f"{name} was not made"):
            await export.export_run(StoredTrajectories(stored), TrajectoryFilter(), tmp_path / name, stop)
    assert os.listdir(tmp_path) == ["there"]  # noqa: PTH208 - Path.iterdir is refused in async functions


async def test_a_directory_has_files_of_bounded_size_in_order(
    stored: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(export, "AT_ONCE", 2)
    monkeypatch.setattr(export, "ROWS_A_FILE", 8)
    monkeypatch.setattr(export, "ROW_GROUP", 4)
    assert await exported(stored, tmp_path / "all") == EVERYTHING
    files = sorted((tmp_path / "all").iterdir())
    assert [path.name for path in files] == [f"train-{n:05}.parquet" for n in range(3)]
    opened = [pyarrow.parquet.ParquetFile(path) for path in files]
    assert [(one.metadata.num_rows, one.metadata.num_row_groups) for one in opened] == [(8, 2)] * 3
    ids = [name for one in opened for name in one.read()["trajectory_id"].to_pylist()]
    assert ids == sorted(ids)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_datasets_reads_the_directory(stored: RunDirectory, tmp_path: Path):
    """`SLUICE_TEST_DATASETS` names an interpreter that has the package already."""
    python = os.environ.get("SLUICE_TEST_DATASETS")
    if python is None:
        python = str(tmp_path / "venv/bin/python")
        subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=120)
        command = [python, "-m", "pip", "install", "--quiet", "datasets>=4,<6"]
        subprocess.run(command, check=True, timeout=400)
    for name in ("all", "all.jsonl"):
        asyncio.run(exported(stored, tmp_path / name, token_ids=True))
    program = (
        "import datasets, sys, json\n"
        "found = datasets.load_dataset('parquet', data_dir=sys.argv[1])\n"
        "lines = datasets.load_dataset('json', data_files=sys.argv[2])['train']\n"
        "one = found['train'][15]\n"
        "told = [[*found], found['train'].num_rows, len(lines), one['advantage'], one['token_ids'][:3]]\n"
        "print(json.dumps(told))"
    )
    variables = {"PATH": "/usr/bin:/bin", "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    said = subprocess.run(
        [python, "-c", program, tmp_path / "all", tmp_path / "all.jsonl"],
        env=variables, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout) == [["train"], EVERYTHING, EVERYTHING, 0.5, [0, 1, 2]]


async def test_answers_that_storage_removes_meanwhile_are_told_of_as_they_were_read(tmp_path: Path):
    run = make_run(tmp_path, "live", steps=3)
    write_held_out_answers(run, 3)
    source = HeldOutTrajectories(run)
    async with source.groups() as groups:
        [[t, _]] = await groups.read([1])
        run.held_out_answers.unlink()
        assert await groups.read([1]) == []
    assert (await source.training([1]))[1].told(t).startswith("held out of training, evaluated at version 3")
