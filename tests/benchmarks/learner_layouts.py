"""Tells how fast a step of the learner is on all ranks of a world, by how they share the model.

`torchrun --nproc-per-node N -m benchmarks.learner_layouts` prints a line of JSON for each layout, one
after another in the same world. Every layout trains on N times the tokens of one rank alone in a step. Names
of layouts behind the command choose among them; each is one argument, as in `"context ring, long" data`.
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from benchmarks.learner import OVER_TOKENS, PEAK_FLOPS, released, seconds_of, trainer_of
from benchmarks.learner_workloads import Workload, qwen3_600m, small, small_experts
from bus.codec import Json
from bus.errors import ConfigError, TrainingError
from learner.backends.contract.backend import StepResult
from learner.backends.factory import close_world, init_world
from learner.backends.megatron.core.process_groups import divide_world
from learner.config.backend import BackendName
from learner.config.parallel import UNDIVIDED, ParallelConfig
from learner.distributed.process_group import gathered


@dataclass(frozen=True)
class Layout:
    """One way in which the ranks share a model, and the step that they are measured with."""

    workload: Workload
    """The step of one rank alone."""
    parallel: ParallelConfig = UNDIVIDED
    backend: BackendName = "megatron"


def layouts(ranks: int) -> dict[str, Layout]:
    """Return every layout of so many ranks by its name. Raises `ConfigError` for a single rank."""
    if ranks == 1:
        raise ConfigError("one rank shares a model with nobody: start several, by torchrun --nproc-per-node")
    cuda = torch.cuda.is_available()
    dense = qwen3_600m(tokens=16384) if cuda else replace(small(), rounds=2)
    found = {
        "data": Layout(dense),
        "data, overlapped": Layout(
            dense, ParallelConfig(overlap_grad_reduce=True, overlap_param_gather=True)
        ),
        "fsdp": Layout(dense, backend="fsdp"),
        "pipeline": Layout(dense, ParallelConfig(pipeline=ranks)),
        "tensor and sequence": Layout(dense, ParallelConfig(tensor=ranks, sequence=True)),
        "context": Layout(dense, ParallelConfig(context=ranks)),
        **_of_long_sequences(dense, ranks),
    }
    if cuda:
        experts = small_experts()
        found["experts, data"] = Layout(experts)
        found["experts"] = Layout(experts, ParallelConfig(expert=ranks))
        found["experts, fsdp"] = Layout(experts, backend="fsdp")
    return found


def _of_long_sequences(dense: Workload, ranks: int) -> dict[str, Layout]:
    """Return layouts of 64k tokens a micro-batch: of one sequence, or of 16 that ranks may have whole."""
    long = short = dense
    if torch.cuda.is_available():
        long = replace(dense, sequence=65536, micro_batch=65536, micro_batches=1)
        short = replace(long, sequence=4096)
    gather, ring = (ParallelConfig(context=ranks, context_attention=way) for way in ("gather", "ring"))
    full, selective = {"recompute": "full"}, {"recompute": "selective"}
    return {
        "data, long": Layout(long, UNDIVIDED.model_copy(update=full)),
        "context, long": Layout(long, gather.model_copy(update=full)),
        "context ring, long": Layout(long, ring.model_copy(update=full)),
        "context, long, selective": Layout(long, gather.model_copy(update=selective)),
        "context ring, long, selective": Layout(long, ring.model_copy(update=selective)),
        "context ring, short": Layout(short, ring),
        "context ring, short whole": Layout(
            short, ring.model_copy(update={"context_min_tokens": 2 * short.sequence})
        ),
    }


def measured(name: str, layout: Layout) -> dict[str, Json]:
    """Measure a layout in the world there is. Every rank calls this, and all return the same."""
    divide_world(layout.parallel)
    step, tokens = _step(layout)
    step()
    if cuda := torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    rounds = range(layout.workload.rounds)
    seconds = statistics.median(max(gathered(seconds_of(step, wall=True))) for _ in rounds)
    flops = layout.workload.flops() * tokens / layout.workload.tokens
    ranks = dist.get_world_size()
    return {
        "layout": name,
        "ranks": ranks,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "tokens_per_s": tokens / seconds,
        "mfu": flops / seconds / PEAK_FLOPS / ranks if cuda else None,
        "peak_gib": max(gathered(torch.cuda.max_memory_allocated())) / 2**30 if cuda else None,
        "loss": step().loss,
    }


def _step(layout: Layout) -> tuple[Callable[[], StepResult], int]:
    """Return this rank's step, and the tokens that all ranks train on in it."""
    ranks = dist.get_world_size()
    workload = replace(layout.workload, micro_batches=ranks * layout.workload.micro_batches)
    torch.manual_seed(0)  # every rank has the same weights
    trainer = trainer_of(workload, layout.parallel, layout.backend)
    group = trainer.data_parallel_group
    mine = workload.batches()[group.rank() :: group.size()]
    return lambda: trainer.train_step(mine, OVER_TOKENS, policy_version=0), workload.tokens


def every(names: Sequence[str], known: Mapping[str, Layout]) -> Iterator[dict[str, Json]]:
    """Measure the layouts of these names, or all.

    Raises `ConfigError` for an unknown name, and `TrainingError` for what does not fit into this GPU's
    memory: that ends the world, since it may fit into those of other ranks, which then wait for this one."""
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"layouts {unknown} are not among {list(known)}")
    for name in names or known:
        with released():
            try:
                yield measured(name, known[name])
            except torch.OutOfMemoryError as error:
                raise TrainingError(
                    f"the layout {name!r} does not fit into the memory of rank {dist.get_rank()} ({error}): "
                    f"name the others of {list(known)} behind the command"
                ) from error


def main() -> None:
    """Print a line for each layout, on rank 0."""
    init_world()
    for found in every(sys.argv[1:], layouts(dist.get_world_size())):
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)  # noqa: T201 - the user's terminal
    close_world()  # not after an error: other ranks may be waiting, until torchrun ends them


if __name__ == "__main__":
    main()
