import dataclasses
import subprocess
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from benchmarks import learner as bench
from benchmarks import learner_layouts
from benchmarks.learner import hugging_face, model_of, ours, side_by_side, sides, single_sides, trainer_of
from benchmarks.learner_images import qwen3_vl_600m, small_images
from benchmarks.learner_layouts import Layout, every, layouts
from benchmarks.learner_workloads import Workload, qwen3, small, small_experts, small_latent, weights
from bus.errors import ConfigError, TrainingError
from learner.config.parallel import UNDIVIDED, ParallelConfig
from learner.data.balancing import forward_flops
from learner.logprobs.logprobs import score


@pytest.mark.nightly
@pytest.mark.slow
def test_all_sides_train_and_are_compared():
    threads = torch.get_num_threads()
    whole = small()
    model = dataclasses.replace(whole, sequence=32, micro_batch=64, rounds=1)
    images = dataclasses.replace(small_images(), sequence=48, micro_batch=96, rounds=1)
    report = side_by_side(model, images)
    torch.set_num_threads(threads)
    assert report["ratios"].keys() == report["limits"].keys()
    assert {"fsdp_over_hf", "images_fsdp_over_hf"} <= report["ratios"].keys()
    assert min(*report["ratios"].values(), *report["absolute"].values()) > 0


def test_sides_are_measured_one_by_one():
    tiny = Workload(qwen3(32, 64, 2, 4, 2, 8, 128), torch.float32, 32, 64, 1, rounds=1)
    known = {"ours": (ours, tiny), "hf": (hugging_face, tiny)}
    found = list(single_sides(["hf"], known))
    assert [each["side"] for each in found] == ["hf"]
    assert found[0]["tokens_per_s"] > 0
    with pytest.raises(ConfigError, match=r"sides \['hff'\] are not among \['ours', 'hf'\]"):
        next(single_sides(["hff"], known))


def test_several_sides_that_are_named_have_a_process_each(monkeypatch):
    monkeypatch.setattr(bench, "_alone", lambda name: {"tokens_per_s": len(name)})
    monkeypatch.setattr(bench, "_measured", lambda *_: pytest.fail("in this process"))
    known = {"ours": (ours, small()), "hf": (hugging_face, small())}
    found = list(single_sides(["hf", "ours"], known))
    assert found == [{"side": "hf", "tokens_per_s": 2}, {"side": "ours", "tokens_per_s": 4}]


def test_what_changes_transformers_runs_in_a_process_of_its_own(monkeypatch):
    asked, here = [], []

    def process(command, **_):
        asked.append(command[-1])
        return subprocess.CompletedProcess(
            command, 0, 'loading\n{"side": "hf", "tokens_per_s": 2.0, "mfu": 0.5}\nbye'
        )

    def measured(side, _):
        here.append(side)
        return {"tokens_per_s": 1.0, "mfu": 0.25}

    monkeypatch.setattr(subprocess, "run", process)
    monkeypatch.setattr(bench, "_measured", measured)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    report = bench._on_cuda()
    assert asked == ["hf", "hf_16k", "experts_hf", "latent_hf", "images_hf"] * bench.CUDA_ROUNDS
    assert hugging_face not in here
    assert report["ratios"].keys() == report["limits"].keys()
    assert report["ratios"]["fsdp_over_hf"] == 0.5
    assert report["absolute"]["tokens_per_s"] == 1.0


def test_sides_of_this_machine_have_names():
    assert {"ours", "hf", "sequences"} <= sides().keys()


@pytest.mark.slow
def test_both_sides_with_images_begin_with_the_same_loss():
    workload = dataclasses.replace(small_images(), sequence=48, micro_batch=96, micro_batches=1)
    torch.manual_seed(0)
    trainer = trainer_of(workload, UNDIVIDED, "fsdp")
    torch.manual_seed(0)
    model = model_of(workload)
    [batch] = workload.batches()
    assert [(image.rows, image.columns) for image in batch.images] == [(4, 8)] * 2
    assert len({image.digest for image in batch.images}) == 2
    with torch.no_grad():
        theirs = model(**workload.plain_inputs(batch)).loss
    found = [scores.logprobs for scores in score(trainer, workload.samples(), tokens_per_micro_batch=96)]
    assert np.nanmean(np.concatenate(found)) == pytest.approx(-theirs.item(), abs=1e-5)


def test_the_model_that_sees_has_about_the_size_that_it_is_called_and_its_images_are_of_256_tokens():
    workload = qwen3_vl_600m()
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(workload.model)
    parts = Counter()
    for name, weight in model.named_parameters():
        parts[name.split(".")[1]] += weight.numel()
    assert parts["language_model"] == pytest.approx(0.6e9, rel=0.02)
    assert parts["visual"] == pytest.approx(0.13e9, rel=0.1)
    one = dataclasses.replace(workload, micro_batch=2048, micro_batches=1)
    [image] = one.samples()[0].images
    assert (image.rows, image.columns) == (16, 16)
    attention = 12 * 4 * 1024**2 * 768
    patches = one.flops() / 3 - forward_flops(workload.model, 2048) - attention
    assert patches == pytest.approx(2 * parts["visual"] * 1024, rel=0.35), "mergers see a quarter of them"


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


TINY_STEP = Workload(qwen3(32, 64, 2, 4, 2, 8, 128), torch.float32, 32, 64, 1, rounds=1)
TINY_LAYOUTS = {
    "data": Layout(TINY_STEP),
    "fsdp": Layout(TINY_STEP, backend="fsdp"),
    "context": Layout(TINY_STEP, ParallelConfig(context=2)),
    "ring": Layout(TINY_STEP, ParallelConfig(context=2, context_attention="ring")),
    "whole": Layout(TINY_STEP, ParallelConfig(context=2, context_min_tokens=64)),
}


def tiny_layouts(names):
    return list(every(names, TINY_LAYOUTS))


@pytest.mark.nightly
@pytest.mark.slow
def test_layouts_of_two_ranks_train_on_the_same_and_are_measured(worlds):
    chosen = ["whole", "ring", "context", "fsdp", "data"]
    first, second = worlds.run(2, tiny_layouts, chosen)
    assert first == second
    assert [(each["layout"], each["ranks"]) for each in first] == [(name, 2) for name in chosen]
    assert all(each["tokens_per_s"] > 0 for each in first)
    assert [each["loss"] for each in first] == pytest.approx([first[0]["loss"]] * len(first), rel=1e-6)


def test_a_layout_that_does_not_fit_ends_the_world_with_its_name(monkeypatch):
    def refuse(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(learner_layouts, "measured", refuse)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    with pytest.raises(TrainingError, match=r"'ring' does not fit into the memory of rank 1 \(no room\)"):
        next(every(["ring"], TINY_LAYOUTS))


def test_layouts_are_of_several_ranks():
    several = layouts(4)
    assert (
        several["context ring, short whole"].parallel.context_min_tokens > several["data"].workload.sequence
    )
    assert {layout.parallel.context for layout in several.values()} == {1, 4}
    with pytest.raises(ConfigError, match="one rank shares a model with nobody"):
        layouts(1)


def test_a_layout_that_there_is_not_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"layouts \['tensr'\] are not among \['tensor'\]"):
        next(every(["tensr"], {"tensor": Layout(small(), ParallelConfig(tensor=2))}))
