"""Tests what `launch bench bus` reports."""

import pytest

from benchmarks import bus as bench


@pytest.mark.nightly
@pytest.mark.nats
@pytest.mark.slow
def test_bench_gives_every_ratio_with_its_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "ROUNDS", 1)
    monkeypatch.setattr(bench, "SECONDS", 0.1)
    report = bench.bench_bus()
    assert set(report) == {"ratios", "limits", "absolute"}
    assert set(report["ratios"]) == set(report["limits"]) == set(bench.LIMITS)
    assert all(ratio is None or ratio > 0 for ratio in report["ratios"].values())
    assert report["ratios"]["publish_16k_over_tcp"] is not None
