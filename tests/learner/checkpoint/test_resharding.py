"""A checkpoint of one layout goes on under another as if nothing had happened."""

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from torch import Tensor

from learner.backends.megatron.checkpoint_state import saved_tensors
from learner.backends.megatron.core.megatron_core import parallel_state
from learner.backends.megatron.trainer import Trainer
from learner.checkpoint.commit import load_checkpoint, save_checkpoint
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.data.packing import pack
from storage.disk.checkpoints import latest as latest_checkpoint
from tests.learner.division import divide_world
from tests.learner.tiny import TIS, hf_state, random_samples, tiny_model

OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=3, weight_decay=0.1, eps=1e-4)
PLAIN = {"distributed_optimizer": False}
LAYOUTS = {
    "one rank": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tensor": 2}),
    "tp2 sp": (2, {"tensor": 2, "sequence": True}),
    "pp2": (2, {"pipeline": 2}),
    "pp2 vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "cp2": (2, {"context": 2}),
    "ep2": (2, {"expert": 2}),
    "dp2 overlapped": (2, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    "tp2 sp ep2": (2, {"tensor": 2, "sequence": True, "expert": 2}),
    "dp2 plain": (2, PLAIN),
    "one rank plain": (1, PLAIN),
    "tp2 plain": (2, PLAIN | {"tensor": 2}),
    "tp2 pp2": (4, {"tensor": 2, "pipeline": 2}),
}
DENSE = {"num_hidden_layers": 4, "vocab_size": 59}
EVEN = {"num_hidden_layers": 4}
TIED = DENSE | {"tied": True}
MOE = {"family": "qwen3_moe"}
DEEPSEEK = {"family": "deepseek_v3"}
"""The first of its two layers, and of two stages of a pipeline, has no experts."""
GPT_OSS, GEMMA = {"family": "gpt_oss"}, {"family": "gemma3_text", "tied": True}
QWEN3_NEXT, QWEN3_5 = {"family": "qwen3_next"}, {"family": "qwen3_5_text"}
ONE_HEAD = {"num_key_value_heads": 1}
CHANGES = [
    ("dp2", "dp2", DENSE),
    ("tp2 sp", "one rank", DENSE),
    ("tp2", "pp2", TIED),
    ("pp2", "tp2", EVEN | {"tied": True}),
    ("pp2 vpp2", "cp2", DENSE),
    ("ep2", "ep2", MOE),
    ("one rank", "ep2", MOE),
    ("one rank plain", "tp2 plain", DENSE),
    ("tp2 sp ep2", "pp2", DEEPSEEK),
    ("pp2", "ep2", DEEPSEEK | {"num_hidden_layers": 3}),
    ("tp2 sp ep2", "pp2", GPT_OSS),
    ("one rank", "tp2 sp ep2", GPT_OSS),
    ("pp2", "tp2 sp", GEMMA),
    ("tp2 sp ep2", "pp2", QWEN3_NEXT),
    ("cp2", "tp2 sp", QWEN3_NEXT),
    ("one rank", "tp2 sp", QWEN3_5),
    ("tp2", "dp2", QWEN3_5),
    ("tp2 sp", "dp2", ONE_HEAD),
]
FURTHER_CHANGES = [
    ("dp2", "tp2 pp2", DENSE),
    ("tp2 pp2", "dp2 overlapped", DENSE),
    ("cp2", "pp2 vpp2", TIED),
    ("tp2 sp ep2", "ep2", MOE),
    ("pp2", "one rank", DEEPSEEK),
    ("one rank", "tp2", ONE_HEAD),
    ("pp2", "one rank", TIED),
    ("pp2", "tp2", TIED),
    ("pp2", "tp2", DENSE),
    ("pp2", "tp2", EVEN),
    ("one rank", "tp2", TIED),
    ("dp2 overlapped", "one rank", DENSE),
    ("ep2", "one rank", MOE),
    ("dp2 plain", "one rank plain", DENSE),
]


def train(layout: dict[str, object], model_changes: dict[str, object], mode: str, root: Path | None):
    """Two steps, or four when mode is "whole"; on a rank of a world."""
    parallel = ParallelConfig(**layout)
    divide_world(parallel)
    model = tiny_model(**model_changes)
    trainer = Trainer(model.config, hf_state(model), OPTIMIZER, parallel=parallel)
    if mode == "resume":
        load_checkpoint(trainer, latest_checkpoint(root))
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    results = []
    for step in range(trainer.counts.steps_done, 4 if mode == "whole" else trainer.counts.steps_done + 2):
        samples = random_samples([5, 17, 2, 32, 9, 20, 20, 3], seed=step)[rank::ranks]
        result = trainer.train_step(pack(samples, 40), TIS, policy_version=3)
        results.append((result.loss, result.grad_norm))
    if mode == "save":
        prepared, copied = bytes_of(saved_tensors(trainer)), []
        buffers = trainer._checkpoint_buffers
        copies = buffers.copies
        buffers.copies = lambda tensors: copied.append(bytes_of(tensors)) or copies(tensors)
        save_checkpoint(trainer, root, 2, {}, keep=1)
        assert copied == [prepared], "each rank locks memory for what it copies"
    return results


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@pytest.fixture(scope="module")
def whole(worlds):
    """Four steps of a model on one rank, trained once."""

    @cache
    def steps(model: tuple[tuple[str, object], ...]):
        return worlds.run(1, train, {}, dict(model), "whole", None)[0]

    return lambda model: steps(tuple(model.items()))


def _size_bytes(checkpoint: Path, rank: int) -> int:
    return sum(file.stat().st_size for file in checkpoint.glob(f"__{rank}_*"))


@pytest.mark.first(5, others=pytest.mark.nightly)
@pytest.mark.parametrize(
    ("before", "after", "model"),
    [
        *(pytest.param(*change, marks=pytest.mark.slow) for change in CHANGES),
        *(pytest.param(*change, marks=pytest.mark.nightly) for change in FURTHER_CHANGES),
    ],
)
def test_two_steps_a_checkpoint_and_two_steps_elsewhere_are_four_steps(
    worlds, whole, tmp_path, before, after, model
):
    ranks, layout = LAYOUTS[before]
    found = worlds.run(ranks, train, layout, model, "save", tmp_path)[0]
    if before == "dp2":  # half of the state of the optimizer is the second rank's, and it saves that alone
        first, second = (_size_bytes(latest_checkpoint(tmp_path), rank) for rank in range(2))
        assert first < 2 * second < 2 * first
    ranks, layout = LAYOUTS[after]
    found += worlds.run(ranks, train, layout, model, "resume", tmp_path)[0]
    for ours, expected in zip(found, whole(model), strict=True):
        assert ours == pytest.approx(expected, abs=1e-5)


def train_save_and_resume(layout: dict[str, object], changes: dict[str, object], root: Path, times: int):
    """A step and a checkpoint, so many times, and what the last one holds; on a rank of a world."""
    parallel = ParallelConfig(**layout)
    divide_world(parallel)
    model = tiny_model(**changes)
    steps = []
    for _ in range(times):
        trainer = Trainer(model.config, hf_state(model), OPTIMIZER, parallel=parallel)
        if steps:
            load_checkpoint(trainer, latest_checkpoint(root))
        steps.append(trainer.counts.steps_done)
        trainer.train_step(pack(random_samples([5, 17, 2], seed=0), 40), TIS, policy_version=3)
        save_checkpoint(trainer, root, trainer.counts.steps_done, {}, keep=1)
    return steps


@pytest.mark.slow
def test_a_pipeline_with_a_dense_stage_is_resumed_from_what_a_resumed_one_saved(worlds, tmp_path):
    ranks, layout = LAYOUTS["pp2"]
    assert worlds.run(ranks, train_save_and_resume, layout, DEEPSEEK, tmp_path, 3)[0] == [0, 1, 2]
