"""What a trace says of the rank that it is of."""

import gzip
import json
import pickle
import time

import pytest
import torch

from learner.metrics.profiler import Profiler, covered
from learner.run.profiling import described


def test_a_trace_names_the_operators_that_took_the_time_and_how_long_none_ran(tmp_path):
    profiler, square = Profiler(), torch.ones(512, 512)
    profiler.begin()
    for _ in range(5):
        square @ square
        square.sum()
    time.sleep(0.3)  # nothing runs
    found = profiler.end(tmp_path / "new", 1)
    assert not found.on_gpu
    assert found.problem == ""
    assert {(one.name, one.calls) for one in found.top} >= {("aten::mm", 5), ("aten::sum", 5)}
    assert [one.seconds for one in found.top] == sorted((one.seconds for one in found.top), reverse=True)
    busy_s = (1 - found.idle_fraction) * found.seconds
    assert 0 < busy_s < found.seconds - 0.3
    assert sum(one.seconds for one in found.top) == pytest.approx(busy_s, rel=0.3), (
        "of itself, without its calls"
    )
    with gzip.open(tmp_path / "new/rank-1.trace.json.gz") as file:
        traced = json.load(file)["traceEvents"]
    assert [event["name"] for event in traced].count("aten::mm") == 5


def test_a_directory_that_cannot_be_written_is_said_and_the_profile_told_all_the_same(tmp_path):
    (tmp_path / "file").write_text("")
    profiler = Profiler()
    profiler.begin()
    torch.ones(3).sum()
    found = profiler.end(tmp_path / "file/below", 0)
    assert found.problem.startswith(f"rank 0 cannot write into {tmp_path}/file/below: ")
    assert found.top
    assert next(iter(described(1, [{}], [found]))) == found.problem


def test_spans_that_overlap_count_once():
    assert covered([(0, 2), (1, 3), (1, 2), (5, 6), (6, 7)]) == 5
    assert covered([(0, 4), (1, 2), (3, 5)]) == 5, "one within another ends nothing"
    assert covered([]) == 0


@pytest.mark.gpu
def test_on_a_gpu_kernels_are_named_and_a_snapshot_of_its_memory_is_written(tmp_path):
    square = torch.ones(4096, 4096, device="cuda")
    square @ square  # what a first call loads is no part of the profile
    torch.cuda.synchronize()
    profiler = Profiler()
    profiler.begin()
    for _ in range(5):
        square @ square
    torch.cuda.synchronize()
    time.sleep(0.3)  # nothing runs
    found = profiler.end(tmp_path, 0)
    assert found.on_gpu
    assert found.top[0].calls == 5, found.top
    assert "aten::" not in found.top[0].name, "the kernel, not the operator that launches it"
    assert 0 < (1 - found.idle_fraction) * found.seconds < found.seconds - 0.3
    assert sum(one.seconds for one in found.top) == pytest.approx(
        (1 - found.idle_fraction) * found.seconds, rel=0.1
    )
    snapshot = pickle.loads((tmp_path / "rank-0.memory.pickle").read_bytes())
    assert snapshot["device_traces"][0], "allocations while it was recorded"
    assert (tmp_path / "rank-0.trace.json.gz").exists()
