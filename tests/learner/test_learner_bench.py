import dataclasses

import torch

from launch.benchmarks.learner import side_by_side, small, weights


def test_all_sides_train_and_are_compared():
    threads = torch.get_num_threads()
    whole = small()
    model = dataclasses.replace(whole, sequence=32, micro_batch=64, rounds=1)
    report = side_by_side(model)
    torch.set_num_threads(threads)
    assert report["ratios"].keys() == {"step_over_bare", "step_over_hf", "sequences_over_tokens"}
    assert min(*report["ratios"].values(), *report["absolute"].values()) > 0


def test_weights_are_counted_once():
    assert weights(small().model) == 4 * 256 * (2 * 256 + 2 * 128 + 3 * 768) + 4096 * 256
