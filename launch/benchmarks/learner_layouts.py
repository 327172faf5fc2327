"""Tells how fast a step of the learner is on all ranks of a world, by how they share the model.

`torchrun --nproc-per-node N -m launch.benchmarks.learner_layouts` prints a line of JSON for each layout, one
after another in the same world. Every layout trains on N times the tokens of one rank alone in a step. Names
of layouts behind the command choose among them.
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from transformers.core_model_loading import revert_weight_conversion

from bus.codec import Json
from bus.errors import ConfigError
from launch.benchmarks.learner import OPTIMIZER, OVER_TOKENS, PEAK_FLOPS, model_of, released, seconds_of
from launch.benchmarks.learner_workloads import Workload, qwen3_600m, small, small_experts
from learner.backends.factory import BACKENDS, close_world, init_world
from learner.backends.megatron.process_groups import divide_world
from learner.config.backend import BackendName
from learner.config.parallel import ParallelConfig


@dataclass(frozen=True)
class Layout:
    """One way in which the ranks share a model, and the step that they are measured with."""

    workload: Workload
    """The step of one rank alone."""
    parallel: Mapping[str, object]
    backend: BackendName = "megatron"


def layouts(ranks: int) -> dict[str, Layout]:
    """Return every layout of so many ranks by its name."""
    cuda = torch.cuda.is_available()
    dense = qwen3_600m(tokens=16384) if cuda else replace(small(), rounds=2)
    long = replace(dense, sequence=65536, micro_batch=65536, micro_batches=1) if cuda else dense
    found = {
        "data": Layout(dense, {}),
        "data, overlapped": Layout(dense, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
        "fsdp": Layout(dense, {}, "fsdp"),
        "pipeline": Layout(dense, {"pipeline": ranks}),
        "tensor and sequence": Layout(dense, {"tensor": ranks, "sequence": True}),
        "context": Layout(dense, {"context": ranks}),
        "context, long": Layout(long, {"context": ranks, "recompute": "full"}),
        "context ring, long": Layout(
            long, {"context": ranks, "context_attention": "ring", "recompute": "full"}
        ),
        "data, long": Layout(long, {"recompute": "full"}),
    }
    if cuda:
        experts = small_experts()
        found["experts, data"] = Layout(experts, {})
        found["experts"] = Layout(experts, {"expert": ranks})
        found["experts, fsdp"] = Layout(experts, {}, "fsdp")
    return found


def measured(name: str, layout: Layout) -> dict[str, Json]:
    """Measure a layout in the world there is. Every rank calls this; all return the same but their memory."""
    parallel = ParallelConfig.model_validate(layout.parallel)
    divide_world(parallel)
    step, tokens = _step(layout, parallel)
    step()
    if cuda := torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(_slowest(seconds_of(step)) for _ in range(layout.workload.rounds))
    flops = layout.workload.flops() * tokens / layout.workload.tokens
    ranks = dist.get_world_size()
    return {
        "layout": name,
        "ranks": ranks,
        "tokens_per_s": tokens / seconds,
        "mfu": flops / seconds / PEAK_FLOPS / ranks if cuda else None,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
    }


def _step(layout: Layout, parallel: ParallelConfig) -> tuple[Callable[[], object], int]:
    """Return this rank's step, and the tokens that all ranks train on in it."""
    ranks = dist.get_world_size()
    workload = replace(layout.workload, micro_batches=ranks * layout.workload.micro_batches)
    torch.manual_seed(0)  # every rank has the same weights
    model = model_of(workload)
    trainer = BACKENDS[layout.backend]()(
        workload.model,
        revert_weight_conversion(model, model.state_dict()),
        OPTIMIZER,
        dtype=workload.dtype,
        parallel=parallel,
    )
    group = trainer.data_parallel_group
    mine = workload.batches()[group.rank() :: group.size()]
    return lambda: trainer.train_step(mine, OVER_TOKENS, policy_version=0), workload.tokens


def _slowest(seconds: float) -> float:
    found: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(found, seconds)
    return max(found)


def every(names: Sequence[str], known: Mapping[str, Layout]) -> Iterator[dict[str, Json]]:
    """Measure the layouts of these names, or all; what does not fit into a GPU's memory says so."""
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"layouts {unknown} are not among {list(known)}")
    for name in names or known:
        with released():
            try:
                yield measured(name, known[name])
            except torch.OutOfMemoryError as error:
                yield {"layout": name, "ranks": dist.get_world_size(), "failed": str(error).split(". ")[0]}


def main() -> None:
    """Print a line for each layout, on rank 0."""
    init_world()
    try:
        for found in every(sys.argv[1:], layouts(dist.get_world_size())):
            if dist.get_rank() == 0:
                print(json.dumps(found), flush=True)  # noqa: T201 - the user's terminal
    finally:
        close_world()


if __name__ == "__main__":
    main()
