"""A run that must learn: the reward `length` rises unless something between actors and learner is wrong."""

import json
from pathlib import Path
from statistics import fmean

import pytest

from tests.e2e.commands import Command

pytestmark = [pytest.mark.nightly, pytest.mark.nats, pytest.mark.timeout(400)]


def test_the_reward_length_rises_within_a_few_steps(tmp_path: Path):
    run = Command(
        tmp_path, "local", "--preset", "sort", "--reward", "length", "--warmup.steps", "0",
        "--learner.steps", "12", "--learner.optimizer.lr", "1e-3", "--evaluation.every-versions", "0",
        "--admission.groups-per-step", "16", "--sampling.max-new-tokens", "40",
    )  # fmt: skip
    try:
        assert run.wait(300) == 0, run.said()
    finally:
        run.kill()
    rows = map(json.loads, (tmp_path / "runs/sort/metrics.jsonl").read_text().splitlines())
    means = [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert fmean(means[-3:]) > fmean(means[:3]) + 0.2, means
