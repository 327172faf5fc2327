"""Every figure of a publication is measured."""

from dataclasses import replace

import pytest
import torch

from launch.bench_weights import LIMITED_BY, LIMITS, bench_weights, settings
from learner.bench import small

pytestmark = [pytest.mark.slow, pytest.mark.nats]


def test_every_figure_is_measured_and_little_travels():
    threads = torch.get_num_threads()
    workload = replace(small(), dtype=torch.bfloat16, sequence=32, micro_batch=32, micro_batches=1)
    report = bench_weights(workload, settings(), versions=2)
    torch.set_num_threads(threads)
    assert report["ratios"].keys() == LIMITS.keys() == LIMITED_BY.keys()
    assert all(figure > 0 for figure in report["ratios"].values())
    assert report["ratios"]["wire_over_full"] < 0.05
    assert report["absolute"]["delta_bytes"] < report["absolute"]["full_bytes"] / 10
