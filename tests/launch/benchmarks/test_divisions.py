"""Whole runs under several divisions of GPUs: which are chosen, what a row has, and that a call goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.divisions import Cell, _is_server, advised, planned, settings, table
from bus.errors import ConfigError

FIGURES = {
    "start_s", "step_s", "learner_idle", "engine_idle", "slots_idle", "stall_s", "pause_s", "host_gib",
    "announced_to_served_s", "checkpoint_s", "resume_s", "rank_killed_s", "server_killed_s", "host_killed_s",
    "export_s",
}  # fmt: skip


def test_the_division_of_the_plan_comes_first_and_others_divide_the_learner_otherwise(tmp_path: Path):
    first, *others = advised("qwen3-8b", 4, tmp_path)
    assert len(others) == 2
    assert len({(one.tensor, one.pipeline, one.expert) for one in (first, *others)}) == 3
    for one in (first, *others):
        assert one.gpus == 4
        assert Cell.named("qwen3-8b", one.division) == one
    times = [
        max(said.step_s, said.generation_s or 0.0) for said in map(planned, (first, *others), [tmp_path] * 3)
    ]
    assert times == sorted(times)


def test_what_is_no_division_is_refused():
    with pytest.raises(ConfigError, match="write a division as 4t2p1e1-2x2"):
        Cell.named("tiny", "4-4")


def test_a_table_has_what_was_planned_beside_what_was_measured():
    row = {"shape": "tiny", "division": "1t1p1e1-1x1", "device": "CPU"}
    rows = [row | {"measured": {"step_s": 2.0, "mfu": None}, "planned": {"step_s": 1.5, "mfu": 0.4}}]
    assert table(rows).splitlines()[-1] == "| tiny | 1t1p1e1-1x1 | CPU | 2 (1.5) |  (0.4) |"


def test_a_model_that_learns_has_the_settings_of_its_recipe_in_its_division(tmp_path: Path, monkeypatch):
    cell, given = Cell.named("sums", "4t2p1e1-2x2"), {"model": {"dtype": "bfloat16"}}
    assert settings(cell, tmp_path).actors.engine.slots == 128  # as the recipe has it
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    config = settings(cell, tmp_path, given)
    assert (config.learner.target_accuracy, config.learner.world.processes) == (0.9, 4)
    assert (config.actors.engine.server["tp_size"], config.model.dtype) == (2, "bfloat16")
    assert config.supervision.environment["actors"] == {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}


def test_engines_may_be_on_gpus_of_the_learner(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    cell = Cell.named("qwen3-0.6b", "2t1p1e1+1x1")
    assert (cell.division, cell.gpus) == ("2t1p1e1+1x1", 2)
    config = settings(cell, tmp_path)
    visible = [config.supervision.environment[side]["CUDA_VISIBLE_DEVICES"] for side in ("learner", "actors")]
    assert (visible, config.actors.engine.server["mem_fraction_static"]) == (["0,1", "0"], 0.3)


def test_a_process_that_ends_while_servers_are_looked_for_is_none():
    with subprocess.Popen(["true"]) as process:
        found = psutil.Process(process.pid)
    assert not _is_server(found)


def measured(directory: Path, *arguments: str) -> dict[str, float | None]:
    """Return the figures of the one row that the command writes; a second call measures none."""
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")])}
    command = [sys.executable, "-m", "benchmarks.divisions", *arguments, "--directory", str(directory)]
    for _ in range(2):
        subprocess.run(command, env=environment, check=True, timeout=1500)
    [row] = map(json.loads, (directory / "divisions.jsonl").read_text().splitlines())
    return row["measured"]


@pytest.mark.nightly
@pytest.mark.timeout(1600)
def test_two_ranks_on_cpus_are_measured_to_the_end_of_all_kills(tmp_path: Path):
    found = measured(tmp_path, "--shapes", "tiny", "--divisions", "2t2p1e1-1x1", "--steps", "4")
    assert found.keys() >= FIGURES
    assert all(found[name] is not None for name in FIGURES - {"checkpoint_s"})


@pytest.mark.multi_gpu
@pytest.mark.timeout(1600)
def test_a_published_model_learns_on_gpus(tmp_path: Path):
    found = measured(tmp_path, "--shapes", "sums", "--divisions", "1t1p1e1-1x1")
    assert found["held_out"] is not None
    assert found["held_out"] >= 0.85  # of the version measured last


@pytest.mark.multi_gpu
@pytest.mark.timeout(1600)
def test_a_learner_and_a_server_on_gpus_are_measured(tmp_path: Path):
    """`pytest -m multi_gpu tests/launch/benchmarks`, where a GPU host has SGLang."""
    found = measured(tmp_path, "--shapes", "qwen3-0.6b", "--divisions", "1t1p1e1-1x1", "--steps", "5")
    assert found.keys() >= FIGURES | {"mfu", "gpu_0_gib", "gpu_1_gib"}
    assert found["mfu"]
