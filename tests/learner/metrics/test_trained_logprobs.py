"""The files that the learner's log-probs of a few trajectories lie in."""

from pathlib import Path

import numpy as np
import pytest

from learner.metrics import trained_logprobs
from learner.metrics.trained_logprobs import read, trajectories, write


def of(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def steps(run: Path) -> list[int]:
    return sorted(int(path.stem.partition("-")[2]) for path in (run / "logprobs").iterdir())


def test_what_is_written_is_read_by_trajectory_and_the_newest_step_counts(tmp_path: Path):
    assert read(tmp_path, [1]) == {}
    assert trajectories(tmp_path) == set()
    write(tmp_path, 1, 1, {"g00000001.0": of(-1, -2), "g00000002.1": of(), "g00000003.0": of(-3)})
    write(tmp_path, 11, 12, {"g00000003.0": of(-0.5)})
    write(tmp_path, 12, 13, {})  # a step without a record
    found = read(tmp_path, [1])["g00000001.0"]
    assert (found.step, found.policy_version, found.logprobs.tolist()) == (1, 1, [-1, -2])
    assert read(tmp_path, [1, 2])["g00000002.1"].logprobs.tolist() == []
    again = read(tmp_path, [1, 11])["g00000003.0"]
    assert (again.step, again.policy_version, again.logprobs.tolist()) == (11, 12, [-0.5])
    assert read(tmp_path, [1])["g00000003.0"].step == 1
    assert read(tmp_path, [4]) == {}
    assert trajectories(tmp_path) == {"g00000001.0", "g00000002.1", "g00000003.0"}
    assert steps(tmp_path) == [1, 11]


def test_the_oldest_records_go_and_so_do_those_of_steps_that_were_undone(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(trained_logprobs, "STEPS_KEPT", 3)
    for step in (1, 11, 21, 31):
        write(tmp_path, step, step, {f"g{step:08}.0": of(-1)})
    assert steps(tmp_path) == [11, 21, 31]
    write(tmp_path, 21, 21, {"g00000099.0": of(-1)})  # a learner that resumed before step 21
    assert steps(tmp_path) == [11, 21]
    assert trajectories(tmp_path) == {"g00000011.0", "g00000099.0"}


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 cut short", None])
def test_a_damaged_record_is_left_out(tmp_path: Path, damage: bytes | None):
    write(tmp_path, 1, 1, {"g00000001.0": of(-1)})
    write(tmp_path, 11, 11, {"g00000011.0": of(-1)})
    path = tmp_path / "logprobs/step-00000011.npz"
    if damage is None:
        path.write_bytes(path.read_bytes()[:-30])
    else:
        path.write_bytes(damage)
    assert trajectories(tmp_path) == {"g00000001.0"}
    assert read(tmp_path, [11]) == {}
