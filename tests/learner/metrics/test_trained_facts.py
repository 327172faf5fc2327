"""The files that advantages and importance ratios of trained trajectories lie in."""

from pathlib import Path

import pytest

from learner.data.outcomes import ImportanceRatios
from learner.metrics import trained_facts
from learner.metrics.trained_facts import TrainedFacts, read, write

RATIOS = ImportanceRatios(1.25, 0.5, 4.0, 0.125)


def facts(advantage: float) -> TrainedFacts:
    return TrainedFacts(advantage, RATIOS)


def test_what_is_written_is_read_by_group_and_step(tmp_path: Path):
    assert read(tmp_path, {1: [1]}) == {}
    of_critic = TrainedFacts(-0.5, None)
    write(tmp_path, 1, {"g00000001.0": facts(0.5), "g00000001.1": of_critic, "g00000002.0": facts(9.0)})
    write(tmp_path, 1001, {"g00000001.0": facts(0.25)})  # which lies in another file
    found = {1: {1: {0: facts(0.5), 1: of_critic}, 1001: {0: facts(0.25)}}}
    assert read(tmp_path, {1: [1, 2, 1001], 2: [2], 3: [1]}) == found
    assert read(tmp_path, {2: [1]}) == {2: {1: {0: facts(9.0)}}}


def test_a_step_that_is_trained_again_counts_and_what_a_kill_cut_short_does_not(tmp_path: Path):
    write(tmp_path, 7, {"g00000001.0": facts(0.5), "g00000001.1": facts(-0.5)})
    [path] = (tmp_path / "trained").iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    assert read(tmp_path, {1: [7]}) == {1: {7: {0: facts(0.5)}}}
    write(tmp_path, 7, {"g00000001.0": facts(2.0), "g00000001.1": facts(-2.0)})
    assert read(tmp_path, {1: [7]}) == {1: {7: {0: facts(2.0), 1: facts(-2.0)}}}


def test_the_oldest_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trained_facts, "FILES_KEPT", 2)
    for step in (1, 100, 200):
        write(tmp_path, step, {"g00000001.0": facts(step)})
    found = read(tmp_path, {1: [1, 100, 200]})
    assert found == {1: {100: {0: facts(100)}, 200: {0: facts(200)}}}
