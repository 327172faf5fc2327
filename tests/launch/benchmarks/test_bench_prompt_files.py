"""The benchmark of prompt files, with few prompts."""

import pytest

from benchmarks.prompt_files import bench_prompt_files


@pytest.mark.nightly
@pytest.mark.slow
def test_both_formats_are_started_twice_with_figures_of_each_start(tmp_path):
    found = bench_prompt_files(tmp_path, prompts=50)
    assert {name: len(starts) for name, starts in found.items()} == {"jsonl": 2, "parquet": 2}
    for start in [*found["jsonl"], *found["parquet"]]:
        assert 0 < start["memory_before_mib"] <= start["peak_memory_mib"]
        assert min(start["wall_s"], start["cpu_s"], start["prompt_us"]) > 0
    copies = {path.name for path in tmp_path.glob("*/data/prompts-*.jsonl")}
    assert len(copies) == 1  # the same prompts, whatever the format
