"""What `launch retrain` prints ends with its verdict, and is short however many steps there were."""

import pytest

from launch.operations.retrain import verdict

SAME = {
    "run": "sort",
    "from_step": 0,
    "changed": {},
    "batches": 300,
    "batches_equal": 300,
    "loss_max_abs_diff": 0.0,
    "grad_norm_max_abs_diff": 0.0,
    "first_step_that_differs": None,
    "steps": [{"step": step} for step in range(300)],
    "seconds": 12.4,
}
CHANGED = {"learner.optimizer.lr": {"before": 1e-5, "after": 2e-5}}


@pytest.mark.parametrize(
    ("changes", "last"),
    [
        ({}, "THE SAME: every step came out as it was recorded"),
        ({"batches_equal": 299, "first_step_that_differs": 7}, "OTHER BATCHES: the run's directory"),
        ({"loss_max_abs_diff": 0.5, "first_step_that_differs": 7}, "OTHER RESULTS without a change"),
        ({"changed": CHANGED, "first_step_that_differs": 1}, "OTHER RESULTS from the same batches"),
    ],
)
def test_the_verdict_comes_last_and_the_report_is_short(changes, last):
    lines = verdict(SAME | changes).splitlines()
    assert lines[-1].startswith(last)
    assert len(lines) <= 5
    assert "300 steps after step 0" in lines[0]
    assert not changes or "the first step that differs is" in "\n".join(lines)
