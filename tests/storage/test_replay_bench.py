"""The measurements run, and replay is as fast as it says."""

import pytest

from launch.benchmarks.replay import LIMITS, bench_replay

pytestmark = [pytest.mark.slow, pytest.mark.nats]


def test_every_figure_is_measured_and_a_million_trajectories_open_at_once(tmp_path):
    report = bench_replay(directory=tmp_path)
    assert report["ratios"].keys() == report["limits"].keys() == report["limited_by"].keys() == LIMITS.keys()
    assert all(ratio > 0 for ratio in report["ratios"].values())
    assert report["absolute"]["trajectories"] >= 1_000_000
    assert report["absolute"]["lost"] == 0
    assert report["absolute"]["actor_connection_rss_bytes"] > 0
    assert report["absolute"]["open_s"] < 2
    assert report["absolute"]["choose_group_us"] < 1000
    assert report["absolute"]["long_mapped_cpu_ms"] < report["absolute"]["long_bus_cpu_ms"]
