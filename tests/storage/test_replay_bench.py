"""The measurements run; with a million trajectories, replay opens as fast as it says."""

import pytest

from benchmarks import replay
from benchmarks.replay import LIMITS, bench_replay
from benchmarks.replay_workload import Size

pytestmark = pytest.mark.nats
SMALL = Size(rounds=1, written=64, stored=512, many=5_000, messages=50, leases=500)


@pytest.mark.nightly
@pytest.mark.slow
def test_every_figure_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(replay, "QUICK", SMALL)
    report = bench_replay(directory=tmp_path)
    assert report["ratios"].keys() == report["limits"].keys() == report["limited_by"].keys() == LIMITS.keys()
    assert all(ratio > 0 for ratio in report["ratios"].values())
    assert report["absolute"]["trajectories"] >= 5_000
    assert report["absolute"]["lost"] == 0
    assert report["absolute"]["actor_connection_rss_bytes"] > 0


@pytest.mark.nightly
def test_a_million_trajectories_open_at_once(tmp_path):
    absolute = bench_replay(directory=tmp_path)["absolute"]
    assert absolute["trajectories"] >= 1_000_000
    assert absolute["open_s"] < 2
    assert absolute["choose_group_us"] < 1000
    assert absolute["long_mapped_cpu_ms"] < absolute["long_bus_cpu_ms"]
