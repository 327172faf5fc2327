import dataclasses

import torch

from benchmarks.learner_workloads import qwen3
from benchmarks.prefix import side_by_side, workload_of


def test_sharing_the_prompt_of_siblings_trains_the_same_with_fewer_tokens():
    threads = torch.get_num_threads()
    workload = dataclasses.replace(workload_of(64, 8), model=qwen3(32, 48, 1, 2, 1, 16, 64), rounds=1)
    report = side_by_side(workload)
    torch.set_num_threads(threads)
    ratios = report["ratios"]
    assert ratios.keys() == report["limits"].keys()
    assert ratios["loss_difference"] < 1e-5
    answers = sum(len(sample.token_ids) - 64 for sample in workload.samples())
    assert ratios["computed_over_unshared"] == (64 + answers) / (16 * 64 + answers)
    assert ratios["shared_over_unshared"] > 0
