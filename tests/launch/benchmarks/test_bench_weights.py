"""Every figure of a publication is measured."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.learner_workloads import small, weights
from benchmarks.weights import LIMITED_BY, LIMITS, bench_weights, settings
from benchmarks.weights_ranks import bench_ranks

pytestmark = [pytest.mark.slow, pytest.mark.nats]


@pytest.mark.nightly
def test_every_figure_is_measured_and_little_travels():
    threads = torch.get_num_threads()
    workload = replace(small(), dtype=torch.bfloat16, sequence=32, micro_batch=32, micro_batches=1)
    report = bench_weights(workload, settings(), versions=2)
    torch.set_num_threads(threads)
    assert report["ratios"].keys() == LIMITS.keys() == LIMITED_BY.keys()
    assert all(figure > 0 for figure in report["ratios"].values())
    assert report["ratios"]["wire_over_full"] < 0.05
    assert report["absolute"]["delta_bytes"] < report["absolute"]["snapshot_bytes"] / 10


@pytest.mark.nightly
def test_adapters_alone_travel_where_they_are_trained():
    threads = torch.get_num_threads()
    workload = replace(small(), dtype=torch.bfloat16, sequence=32, micro_batch=32, micro_batches=1)
    report = bench_weights(workload, settings({"learner": {"lora": {"rank": 2}}}), versions=1)
    torch.set_num_threads(threads)
    assert report["absolute"]["snapshot_bytes"] < weights(workload.model) / 10, "A and B are all that is sent"
    assert report["ratios"].keys() == LIMITS.keys()
    assert all(figure > 0 for figure in report["ratios"].values())


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_sigterm_leaves_no_gigabytes_behind(tmp_path):
    command = [sys.executable, "-m", "launch", "bench", "weights", "--model", "tiny"]
    with subprocess.Popen(
        command, env=os.environ | {"TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE, text=True
    ) as bench:
        assert any("learner_ready" in line for line in bench.stderr)
        assert list(tmp_path.glob("sluice-bench-*/model"))
        bench.send_signal(signal.SIGTERM)
        bench.communicate(timeout=60)
    assert bench.returncode == 128 + signal.SIGINT
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_each_rank_of_a_shared_model_codes_its_share_and_says_what_that_takes():
    config = settings({"learner": {"parallel": {"tensor": 2}}})
    report = bench_ranks("tiny", config, ranks=2, versions=1)
    assert report["backend"] == ("nccl" if torch.cuda.is_available() else "gloo")
    assert len(report["by_rank"]) == 2
    whole, coded = report["weights/full_bytes"], 0
    for figures in report["by_rank"]:
        assert 0.4 * whole < figures["share_bytes"] < 0.6 * whole
        assert figures["tensors_bytes"] == 2 * figures["share_bytes"], "two sets take turns"
        assert figures["wait_s"] > 0
        assert 0 < figures["coded_bytes"] < 0.1 * whole
        assert figures["stored_bytes"] < 0.8 * report["weights/wire_bytes"], "a rank stores what others have"
        coded += figures["coded_bytes"]
    assert coded < report["weights/wire_bytes"] < whole / 10
