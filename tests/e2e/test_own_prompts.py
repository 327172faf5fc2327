"""Prompts of a function without an end, chosen by nobody else, in a run whose processes are killed."""

from contextlib import closing
from pathlib import Path

import pytest

from storage.ledger.ledger import Ledger
from storage.prompts.data_sets import PastPrompts
from tests.e2e.commands import Command, assert_whole, wait_for_step

pytestmark = [pytest.mark.nightly, pytest.mark.nats, pytest.mark.timeout(600)]
SOURCE = """
from itertools import count

def numbers(position):
    for row in count(position):
        digits = f"{row:06d}"
        yield {"prompt": f"sort {digits}", "label": "".join(sorted(digits)), "metadata": {"row": row}}
"""
STEPS, GROUPS = 60, 8


def test_a_killed_run_issues_every_row_once_and_in_order(tmp_path: Path):
    (tmp_path / "my_rows.py").write_text(SOURCE)
    run, settings = tmp_path / "runs/sort", (
        "local", "--preset", "sort", "--prompts", "my_rows:numbers", "--warmup.steps", "0",
        "--learner.steps", str(STEPS), "--learner.checkpoint.save-every", "20",
        "--learner.target-accuracy", "none", "--evaluation.every-versions", "0",
        "--admission.groups-per-step", str(GROUPS), "--admission.samples-per-prompt", "2",
    )  # fmt: skip
    launcher = Command(tmp_path, *settings)
    try:
        wait_for_step(launcher, run, 35, timeout_s=300.0)  # more rows than a block has
        launcher.kill()
        launcher = Command(tmp_path, *settings)
        assert launcher.wait(300) == 0, launcher.said()
    finally:
        launcher.kill()
    assert_whole(run, STEPS, GROUPS, 2)
    with closing(Ledger.open(run / "ledger.sqlite")) as ledger:
        past = PastPrompts(ledger.facts, run / "data")
        assert ledger.next_id >= GROUPS * STEPS
        assert [past.of(n).metadata["row"] for n in range(ledger.next_id)] == list(range(ledger.next_id))
