"""Runs whose engine has weights in codes, and whose learner computes with what they stand for."""

import json
from pathlib import Path

import pytest

from tests.e2e.commands import SMALL, Command, assert_whole

pytestmark = [pytest.mark.nats, pytest.mark.slow]
NEAR = 1e-5
"""Log-probs of two kernels in float32 are so near, in nats."""


def read(file: Path, name: str) -> list[float]:
    rows = map(json.loads, file.read_text().splitlines())
    return [row[name] for row in rows if name in row]


def test_engine_and_learner_have_the_same_policy_at_each_version(tmp_path: Path):
    local = Command(
        tmp_path, "local", *SMALL,
        "--learner.publication.quantisation", "int4", "--learner.quantisation-aware",
    )  # fmt: skip
    try:
        assert local.wait(280.0) == 0, local.said()
    finally:
        local.kill()
    run = tmp_path / "runs/sort"
    assert_whole(run, 4, 4, 4)
    mismatch = read(run / "metrics.jsonl", "policy/mismatch_nats")
    probed = read(run / "counters.jsonl", "engine/probe_nats")
    assert mismatch
    assert probed
    assert max(*mismatch, *probed) < NEAR
    assert max(read(run / "metrics.jsonl", "weights/full_bytes")) < 900_000  # 1.2 MB in float32
