"""Tests what `launch bench episodes` reports."""

import pytest

from benchmarks.episodes import EpisodesLoad, bench_episodes
from bus.errors import ConfigError


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.nats
def test_bench_runs_all_episodes_and_finds_them_whole_on_the_bus():
    report = bench_episodes(EpisodesLoad(episodes=16, turns=3, turn_s=0.01))
    assert (report["episodes"], report["turns"], report["lost"]) == (16, 3, 0)
    assert 0 < report["event_loop_lag_p50_ms"] <= report["event_loop_lag_p99_ms"]
    assert report["turns_per_s"] > 0


@pytest.mark.parametrize(
    ("load", "reason"),
    [((7, 1, 1.0), "multiple of 8"), ((8, 0, 1.0), "a turn at least"), ((8, 1, -1.0), "no time below 0")],
)
def test_load_that_cannot_be_asked_for_is_refused(load: tuple[int, int, float], reason: str):
    with pytest.raises(ConfigError, match=reason):
        EpisodesLoad(*load)
