"""A figure that leaves its range is told once, with what it means."""

import math

import pytest
from structlog.testing import capture_logs

from learner.config.diagnostics import DiagnosticsConfig
from learner.metrics.range_warnings import RangeWarnings, ranges


def told(config: DiagnosticsConfig, *steps: dict[str, float]) -> list[tuple[str, str, int]]:
    warnings = RangeWarnings(config)
    with capture_logs() as logs:
        for step, values in enumerate(steps, start=1):
            warnings.look(step, values)
    return [(entry["event"], entry["figure"], entry["step"]) for entry in logs]


def test_a_figure_is_told_when_it_leaves_its_range_and_when_it_is_back():
    ess = "policy/ess_fraction"
    found = told(DiagnosticsConfig(), *({ess: value} for value in (0.9, 0.2, 0.1, 0.3, 0.29)))
    assert found == [
        ("figure_out_of_range", ess, 2),
        ("figure_in_range_again", ess, 4),
        ("figure_out_of_range", ess, 5),
    ]


@pytest.mark.parametrize(
    ("figure", "inside", "outside"),
    [
        ("policy/importance_ratio", (0.5, 1.0, 2.0), (0.49, 2.01, math.nan)),
        ("policy/mismatch_nats", (0.0, 0.1), (0.11, math.inf)),
        ("policy/rejected_fraction", (0.0, 0.5), (0.6,)),
        ("rollout/cut_off_fraction", (0.0,), (0.001, 1.0)),
        ("rollout/completed_fraction", (0.5, 1.0), (0.4,)),
        ("policy/entropy_nats", (0.0, 5.0), ()),
        ("policy/importance_ratio_max", (1e6,), ()),
        ("policy/k3_nats", (0.0, 0.2), (0.21, math.nan)),
        ("policy/chi_square", (1e6,), ()),
        ("policy/drift_nats", (0.3,), (0.31,)),
        ("policy/clipped_fraction", (0.5,), (0.51,)),
        ("policy/truncated_fraction", (0.5,), (0.51,)),
        ("staleness/queued_mean_versions", (32.0,), ()),
        ("staleness/generation_mean_versions", (32.0,), ()),
        ("selection/length_ratio", (1.0, 1.5, 0.67), (1.51, 0.66)),
        ("selection/reward_shift", (-1.0, 1.0), ()),
    ],
)
def test_the_ranges(figure, inside, outside):
    for value in inside:
        assert told(DiagnosticsConfig(), {figure: value}) == []
    for value in outside:
        assert told(DiagnosticsConfig(), {figure: value}) == [("figure_out_of_range", figure, 1)]


def test_without_a_bound_and_without_a_figure_there_is_no_warning():
    unbounded = DiagnosticsConfig(**dict.fromkeys(DiagnosticsConfig.model_fields, None))
    assert told(unbounded, dict.fromkeys(ranges(unbounded), 0.0), dict.fromkeys(ranges(unbounded), 1e9)) == []
    assert told(DiagnosticsConfig(), {}, {"policy/entropy_nats": 0.0}) == []
    assert told(DiagnosticsConfig(least_entropy_nats=0.1), {"policy/entropy_nats": 0.05}) != []


def test_bounds_that_depend_on_the_task_are_taken_from_the_settings():
    config = DiagnosticsConfig(largest_reward_shift=0.1, largest_queued_versions=2.0, largest_ratio=5.0)
    for figure, value in (
        ("selection/reward_shift", -0.11),
        ("staleness/queued_mean_versions", 2.1),
        ("policy/importance_ratio_max", 5.1),
    ):
        assert told(config, {figure: value}) == [("figure_out_of_range", figure, 1)]
    assert told(config, {"selection/reward_shift": 0.1}) == []


def test_every_warning_says_what_to_do():
    for found in ranges(DiagnosticsConfig()).values():
        assert ":" in found.meaning
