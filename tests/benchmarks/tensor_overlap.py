"""Tells how fast ranks train that share layers, with their exchanges beside the products and apart from them.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.tensor_overlap

Each line of JSON is a side: `beside` and `apart` (tensor and sequence, in turns, on the same weights),
`tensor` alone and `data` parallel; a world of one rank has `single`. Behind them comes a table of a step's
kernels. `--symmetric` moves tokens by torch's symmetric memory instead of NCCL in `beside`. On CUDA the
model is an 8B in bfloat16, elsewhere a tiny one. `--sides`, `--micro-batches`, `--tokens` (of a rank alone)
and `--rounds` make it shorter."""

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.learner import OVER_TOKENS, PEAK_FLOPS, released, seconds_of
from benchmarks.learner_workloads import Workload
from benchmarks.model_shapes import SHAPES
from bus.codec import Json
from learner.backends.factory import BACKENDS, close_world, init_world
from learner.backends.megatron.core import linear
from learner.backends.megatron.core.linear import OVERLAPPED, overlap_exchanges
from learner.backends.megatron.core.process_groups import divide_world
from learner.config.lora import NO_LORA
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import UNDIVIDED, ParallelConfig
from learner.distributed.process_group import gathered

SIDES = ("shared", "tensor", "data")
OPTIMIZER = OptimizerConfig(lr=1e-6, state_dtype="bfloat16")
PROFILED = 2
"""Micro-batches under the profiler."""
ROWS = 15


def exchange_apart(module: torch.nn.Module) -> None:
    """Undo `overlap_exchanges`."""
    for apart, overlapped in OVERLAPPED.items():
        if type(module) is overlapped:
            module.__class__ = apart


WAYS: Mapping[str, Callable[[torch.nn.Module], None]] = {"beside": overlap_exchanges, "apart": exchange_apart}


def workload(micro_batch: int, tokens: int) -> Workload:
    """Return an 8B on CUDA, else a tiny model, with so many tokens a micro-batch and in all."""
    cuda = torch.cuda.is_available()
    config = Qwen3Config(**SHAPES["qwen3-8b" if cuda else "tiny"], attn_implementation="sdpa")
    sequence = min(2048, micro_batch)
    return Workload(
        config, torch.bfloat16 if cuda else torch.float32, sequence, micro_batch, tokens // micro_batch, 1
    )


def state_of(config: Qwen3Config) -> dict[str, Tensor]:
    """Return random weights, the same in all layers: they are made at once, and no step is slower for it."""
    with torch.device("meta"):
        shapes = {name: w.shape for name, w in AutoModelForCausalLM.from_config(config).state_dict().items()}
    torch.manual_seed(0)
    made = {
        shape: torch.randn(shape) * 0.02 if len(shape) > 1 else torch.ones(shape)
        for shape in dict.fromkeys(shapes.values())
    }
    return {name: made[shape] for name, shape in shapes.items()}


def sides(names: Sequence[str], micro_batches: Sequence[int], tokens: int, rounds: int) -> Iterator[Json]:
    """Measure the sides one after another. Every rank calls this."""
    ranks = dist.get_world_size()
    layouts = {
        "shared": ParallelConfig(tensor=max(ranks, 2), sequence=True),
        "tensor": ParallelConfig(tensor=ranks),
        "data": UNDIVIDED,
    }
    if ranks == 1:
        names = ["data"]
    for name in names:
        with released():
            divide_world(layouts[name])
            first = workload(micro_batches[0], ranks * tokens)
            trainer = BACKENDS["megatron"]()(
                first.model, state_of(first.model), OPTIMIZER,
                dtype=first.dtype, parallel=layouts[name], lora=NO_LORA,
            )  # fmt: skip
            label = "single" if ranks == 1 else name
            ways = list(WAYS) if name == "shared" else [label]
            # All weights and the activations of larger micro-batches are too much for one GPU.
            sizes = micro_batches[:1] if name == "data" else micro_batches
            for size in sizes:
                yield from _turns(trainer, workload(size, ranks * tokens), ways, rounds)
            if name == "shared":
                yield from _profiles(trainer, workload(sizes[0], ranks * tokens))
            del trainer


def _turns(trainer: Any, work: Workload, ways: Sequence[str], rounds: int) -> Iterator[Json]:
    """Measure the ways in turns, each round in the other order."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    losses: dict[str, float] = {}
    ranks = dist.get_world_size()
    mine = _mine(trainer, work)

    def step() -> None:
        losses[way] = trainer.train_step(mine, OVER_TOKENS, policy_version=0).loss

    if cuda := torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    for turn in range(rounds + 1):
        for way in ways if turn % 2 else reversed(ways):
            _go(trainer, way)
            seconds[way].append(max(gathered(seconds_of(step, wall=True))))
    for way, found in seconds.items():
        rates = [work.tokens / s for s in found[1:]]  # the first warms up
        median = statistics.median(rates)
        yield {
            "side": way,
            "ranks": ranks,
            "micro_batch": work.micro_batch,
            "tokens_per_s": round(median, 1),
            "each": [round(rate) for rate in rates],
            "mfu": round(work.flops() / work.tokens * median / PEAK_FLOPS / ranks, 3),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if cuda else None,
            "loss": losses[way],
        }


def _mine(trainer: Any, work: Workload) -> list[Any]:
    group = trainer.data_parallel_group
    return work.batches()[group.rank() :: group.size()]


def _go(trainer: Any, way: str) -> None:
    if way in WAYS:
        for chunk in trainer.chunks:
            for module in chunk.modules():
                WAYS[way](module)


def _profiles(trainer: Any, work: Workload) -> Iterator[Json]:
    """Tell of both ways where the time of a few micro-batches goes, on rank 0."""
    activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    mine = _mine(trainer, work)[:PROFILED]
    for way in reversed(list(WAYS)):
        _go(trainer, way)
        with profile(activities=[activity]) as found:
            trainer.train_step(mine, OVER_TOKENS, policy_version=0)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        kineto = found.profiler.kineto_results
        spans = [
            (e.start_ns(), e.start_ns() + e.duration_ns(), e.name())
            for e in kineto.events()
            if e.device_type().name == activity.name
        ]
        yield {"profile": way, "micro_batch": work.micro_batch, **_shares(spans)}


def _shares(spans: Sequence[tuple[int, int, str]]) -> dict[str, Json]:
    """Return shares of the time between the first kernel and the last: of no kernel, of exchanges alone, and
    of each of the longest kernels."""
    whole = max((end for _, end, _ in spans), default=1) - min((start for start, _, _ in spans), default=0)
    busy = _covered(spans)
    products = _covered([span for span in spans if "nccl" not in span[2]])
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for start, end, name in spans:
        times[name] += end - start
        counts[name] += 1
    return {
        "ms": round(whole / 1e6, 2),
        "idle": round(1 - busy / whole, 4),
        "exchanges_alone": round((busy - products) / whole, 4),
        "kernels": len(spans),
        "longest": [
            [name[:100], counts[name], round(time / 1e6, 2), round(time / whole, 4)]
            for name, time in times.most_common(ROWS)
        ],
    }


def _covered(spans: Sequence[tuple[int, int, str]]) -> int:
    """Return the time during which any of these lasts."""
    covered, reached = 0, 0
    for start, end, _ in sorted(spans):
        covered += max(0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def use_symmetric_memory() -> None:
    """Have torch's own fused operations multiply, whose copies take no multiprocessors of a GPU."""
    from torch.distributed import _symmetric_memory as symmetric  # it has the operations

    symmetric._is_test_mode = not torch.cuda.is_available()  # which takes collective operations instead

    def gathered_product(own: Tensor, matrix: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        symmetric.enable_symm_mem_for_group(group.group_name)
        whole, [product] = symmetric._fused_all_gather_matmul(own.contiguous(), [matrix], 0, group.group_name)
        assert whole is not None  # without a request not to
        return whole, product

    def begun_sum(inputs: Tensor, matrix: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, list[Any]]:
        symmetric.enable_symm_mem_for_group(group.group_name)
        return symmetric._fused_matmul_reduce_scatter(
            inputs.contiguous(), matrix, "sum", 0, group.group_name
        ), []

    linear.gathered_product = gathered_product
    linear._begun_sum = begun_sum


def main() -> None:
    """Print a line for each side, on rank 0."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    parser.add_argument(
        "--micro-batches", nargs="+", type=int, default=[4096, 8192, 16384] if cuda else [64, 128]
    )
    parser.add_argument("--tokens", type=int, default=16384 if cuda else 256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--symmetric", action="store_true")
    given = parser.parse_args()
    init_world()
    if given.symmetric:
        use_symmetric_memory()
    for found in sides(given.sides, given.micro_batches, given.tokens, given.rounds):
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)  # noqa: T201 - the user's terminal
    close_world()  # not after an error: other ranks may be waiting, until torchrun ends them


if __name__ == "__main__":
    main()
