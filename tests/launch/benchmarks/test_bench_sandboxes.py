"""Tests what `launch bench sandboxes` reports."""

import pytest

from benchmarks.sandboxes import bench_sandboxes
from bus.errors import ConfigError


@pytest.mark.slow
def test_bench_starts_sandboxes_and_runs_commands_in_them_beside_bare_processes():
    report = bench_sandboxes(8, 4)
    assert list(report) == ["processes", "starts_and_ends", "commands", "commands_alone"]
    assert all(0 < one["p50_ms"] <= one["p99_ms"] and one["a_second"] > 0 for one in report.values())


def test_fewer_sandboxes_than_run_at_once_are_refused():
    with pytest.raises(ConfigError, match="give at least as many"):
        bench_sandboxes(3, 4)
