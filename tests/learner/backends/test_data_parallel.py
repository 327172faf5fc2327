import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.learner.backends.data_parallel_worker import train

REPOSITORY = Path(__file__).parents[3]
WORKER = Path(__file__).with_name("data_parallel_worker.py")


def run_worker(mode: str, checkpoints: Path, *, ranks: int) -> list[list[float]]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [sys.executable, *launcher, str(WORKER), mode, str(checkpoints)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [pytest.param(2, 1, marks=pytest.mark.nightly), (1, 2)])
def test_ranks_share_a_step_and_a_checkpoint_resumes_on_another_number_of_them(tmp_path, before, after):
    steps = run_worker("save", tmp_path, ranks=before) + run_worker("resume", tmp_path, ranks=after)
    alone = train("save", tmp_path / "alone") + train("resume", tmp_path / "alone")
    for found, expected in zip(steps, alone, strict=True):
        assert found == pytest.approx(expected, abs=1e-5)
