"""What a benchmark takes for a whole run."""

import pytest

from benchmarks.whole_runs.run import _refuse_stopped
from bus.errors import SluiceError
from storage.disk.atomic_files import make_directory, write_json
from storage.disk.run_directory import RunDirectory


def test_a_run_that_somebody_stopped_is_no_outcome(tmp_path):
    run = RunDirectory(tmp_path, "cell")
    make_directory(run.path)
    with pytest.raises(SluiceError, match="cell was stopped from elsewhere, at step 0"):
        _refuse_stopped(run)
    write_json(run.path / "progress.json", {"stage": "rl", "step": 10})
    with pytest.raises(SluiceError, match="cell was stopped from elsewhere, at step 10"):
        _refuse_stopped(run)
    write_json(run.path / "progress.json", {"stage": "done", "step": 60})
    _refuse_stopped(run)
