import dataclasses

import pytest
import torch

from bus.errors import ConfigError
from launch.benchmarks.learner import side_by_side
from launch.benchmarks.learner_layouts import Layout, every
from launch.benchmarks.learner_workloads import small, small_experts, small_latent, weights


def test_all_sides_train_and_are_compared():
    threads = torch.get_num_threads()
    whole = small()
    model = dataclasses.replace(whole, sequence=32, micro_batch=64, rounds=1)
    report = side_by_side(model)
    torch.set_num_threads(threads)
    assert report["ratios"].keys() == report["limits"].keys()
    assert "fsdp_over_hf" in report["ratios"]
    assert min(*report["ratios"].values(), *report["absolute"].values()) > 0


def test_weights_are_counted_once():
    assert weights(small().model) == 4 * 256 * (2 * 256 + 2 * 128 + 3 * 768) + 4096 * 256


def test_a_token_meets_few_of_the_experts():
    attention, router, experts = 1024 * (2 * 2048 + 2 * 1024), 1024 * 32, 4 * 3 * 1024 * 512
    assert weights(small_experts().model) == 12 * (attention + router + experts) + 151936 * 1024


def test_narrow_vectors_and_the_shared_expert_count_and_experts_that_are_not_chosen_do_not():
    queries, keys_and_values = 1024 * 384 + 384 * 16 * 192, 1024 * (256 + 64) + 256 * 16 * (128 + 128)
    attention = queries + keys_and_values + 16 * 128 * 1024
    dense, sparse = 3 * 1024 * 3072, 1024 * 32 + (4 + 1) * 3 * 1024 * 512
    assert weights(small_latent().model) == 12 * attention + dense + 11 * sparse + 151936 * 1024


def layouts_of_two():
    step = dataclasses.replace(small(), sequence=32, micro_batch=64, micro_batches=1, rounds=1)
    known = {
        "data": Layout(step, {}),
        "fsdp": Layout(step, {}, "fsdp"),
        "context": Layout(step, {"context": 2}),
    }
    return list(every(["context", "fsdp"], known))


@pytest.mark.slow
def test_layouts_of_two_ranks_are_measured(worlds):
    for found in worlds.run(2, layouts_of_two):
        assert [(each["layout"], each["ranks"]) for each in found] == [("context", 2), ("fsdp", 2)]
        assert all(each["tokens_per_s"] > 0 for each in found)


def test_a_layout_that_there_is_not_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"layouts \['tensr'\] are not among \['tensor'\]"):
        next(every(["tensr"], {"tensor": Layout(small(), {"tensor": 2})}))
