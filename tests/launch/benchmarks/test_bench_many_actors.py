"""Tests what `launch bench actors-scale` reports."""

import pytest

from benchmarks import many_actors as bench
from bus.errors import BusError


@pytest.mark.nightly
@pytest.mark.nats
@pytest.mark.slow
def test_actors_are_counted_idle_and_at_work(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "SUBJECTS_S", 0.5)
    figures = bench.bench_many_actors(bench.Load(actors=50, window_s=1.0, settle_s=1.0, rollout_s=0.2))
    idle, busy = figures["idle"], figures["busy"]
    assert isinstance(idle, dict)
    assert isinstance(busy, dict)
    assert figures["actors_on_the_screen"] == 50
    assert idle["messages_per_s"] > 50  # a status each second, at least
    assert idle["kinds_per_s"]["status.actor"] > 0
    assert "trajectories" not in idle["kinds_per_s"]
    assert set(idle["cores"]) == {"nats_server", "dispatcher", "shards", "screen", "actors_0"}
    assert busy["leases_per_s"] > 0
    assert 0 < busy["round_trip_p50_ms"] <= busy["round_trip_p99_ms"]


@pytest.mark.parametrize("kinds", [{}, {"ack of TASKS": 3.0}, {"status.actor": 0.0}])
def test_mute_actors_are_no_measurement(kinds: dict):
    with pytest.raises(BusError, match="no actor sent a status"):
        bench._refuse_mute(kinds)
