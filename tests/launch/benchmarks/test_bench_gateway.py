"""Tests what `launch bench gateway` reports."""

import pytest

from benchmarks import gateway as bench


@pytest.mark.nightly
@pytest.mark.slow
def test_bench_gives_a_request_to_policy_and_gateway(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "ALONE", 1)
    monkeypatch.setattr(bench, "AT_ONCE", 2)
    report = bench.bench_gateway()
    for name in ("policy_ms", "gateway_ms", "gateway_of_many_ms"):
        assert 0 < report[name]["p50"] <= report[name]["p99"]
        assert report[name]["cpu"] > 0
    assert report["gateway_of_many_load"]["requests"] == 2 * bench.TURNS
