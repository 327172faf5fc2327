"""The files that the advantages of trained trajectories lie in."""

from pathlib import Path

import pytest

from learner.metrics import trained_advantages
from learner.metrics.trained_advantages import read, write


def test_what_is_written_is_read_by_group_and_step(tmp_path: Path):
    assert read(tmp_path, {1: [1]}) == {}
    write(tmp_path, 1, {"g00000001.0": 0.5, "g00000001.1": -0.5, "g00000002.0": 9.0})
    write(tmp_path, 1001, {"g00000001.0": 0.25})  # which lies in another file
    assert read(tmp_path, {1: [1, 2, 1001], 2: [2], 3: [1]}) == {1: {1: {0: 0.5, 1: -0.5}, 1001: {0: 0.25}}}
    assert read(tmp_path, {2: [1]}) == {2: {1: {0: 9.0}}}


def test_a_step_that_is_trained_again_counts_and_what_a_kill_cut_short_does_not(tmp_path: Path):
    write(tmp_path, 7, {"g00000001.0": 0.5, "g00000001.1": -0.5})
    [path] = (tmp_path / "advantages").iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    assert read(tmp_path, {1: [7]}) == {1: {7: {0: 0.5}}}
    write(tmp_path, 7, {"g00000001.0": 2.0, "g00000001.1": -2.0})
    assert read(tmp_path, {1: [7]}) == {1: {7: {0: 2.0, 1: -2.0}}}


def test_the_oldest_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trained_advantages, "FILES_KEPT", 2)
    for step in (1, 100, 200):
        write(tmp_path, step, {"g00000001.0": float(step)})
    assert read(tmp_path, {1: [1, 100, 200]}) == {1: {100: {0: 100.0}, 200: {0: 200.0}}}
