"""Attention of one rank around the ring; as a program of torchrun, it beside gathered keys on GPUs."""

import json
import sys
import weakref
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from learner.backends.factory import close_world, init_world
from learner.backends.megatron.core.megatron_core import parallel_state
from learner.backends.megatron.model.attention import ring_attention
from learner.backends.megatron.model.attention.context_attention import (
    attend_to_gathered,
    chunks_of_rank,
    context_layout,
    gathered,
)
from learner.backends.megatron.model.attention.ring_attention import _Exchange, attend_around
from learner.backends.megatron.model.attention.ring_layout import RingLayout
from learner.backends.megatron.trainer import Trainer
from learner.backends.shared.packed_attention import of_one_width
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.data.packing import pack
from learner.distributed.process_group import device
from tests.learner.division import divide_world
from tests.learner.tiny import TIS, hf_state, random_samples, tiny_model

HEADS, GROUPS, WIDTH = 6, 2, 16
SCALE = 0.3
CUDA_LENGTHS = [4, 300, 64, 2048, 1028]
MODELS = {
    "qwen3": {"head_dim": 32},
    "mistral": {"head_dim": 32, "sliding_window": 8},
    "deepseek_v3": {"num_hidden_layers": 2},
}


def places(lengths: list[int], ranks: int, rank: int) -> Tensor:
    """Numbers of a rank's tokens in the whole pack."""
    chunks = [sequence.chunk(2 * ranks) for sequence in torch.arange(sum(lengths)).split(lengths)]
    return torch.cat([each[i] for each in chunks for i in chunks_of_rank(ranks, rank)])


def drawn(lengths: list[int], value_width: int, *, width: int = WIDTH, **where: object) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output, of the whole pack."""
    generator = torch.Generator().manual_seed(0)
    shapes = (HEADS, width), (GROUPS, width), (GROUPS, value_width), (HEADS, value_width)
    return [
        torch.randn(sum(lengths), *shape, generator=generator, dtype=torch.float64).to(**where)
        for shape in shapes
    ]


def with_gradients(attend, query: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values."""
    inputs = [x.clone().requires_grad_() for x in (query, key, value)]
    output = attend(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, grad)]


def of_whole_sequences(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], window: int | None
) -> Tensor:
    """Attention of each sequence by itself, with a mask."""
    found = []
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        position = torch.arange(len(q), device=q.device)
        behind = position[:, None] - position
        seen = (behind >= 0) & (behind < (window or len(q)))
        heads = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(*heads, attn_mask=seen, scale=SCALE, enable_gqa=True)
        found.append(out[0].transpose(0, 1))
    return torch.cat(found)


def context_group() -> dist.ProcessGroup:
    """The world as one context-parallel group."""
    if parallel_state.get_context_parallel_world_size() < dist.get_world_size():
        divide_world(ParallelConfig(context=dist.get_world_size()))
    return parallel_state.get_context_parallel_group()


def around(
    lengths: list[int], window: int | None, value_width: int, dtype: torch.dtype, *, gather: bool = False,
    width: int = WIDTH,
) -> list[Tensor]:  # fmt: skip
    """This rank's output and gradients, on the host; of keys that are gathered if `gather`."""
    group = context_group()
    ranks, rank = group.size(), group.rank()
    here = places(lengths, ranks, rank)
    own = [x[here].to(device()) for x in drawn(lengths, value_width, width=width, dtype=dtype)]
    ring = RingLayout(lengths, ranks=ranks, rank=rank, device=device())
    layout = context_layout(lengths, ranks=ranks, rank=rank, by_length=False).to(device())

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not gather:
            return attend_around(query, key, value, ring.steps(window), group, scale=SCALE)
        heads = of_one_width(query, *gathered(key, value, group))
        return attend_to_gathered(*heads, layout, scale=SCALE, window=window)[..., :value_width]

    return [x.cpu() for x in with_gradients(attend, *own)]


def most_alive(lengths: list[int]) -> tuple[int, int]:
    """Most received tensors that this rank has at a time, of attention alone and with its gradients."""
    seen: list[weakref.ref[Tensor]] = []
    counts: list[int] = []

    class Counted(_Exchange):
        def __init__(self, leaving, target, arriving, source, group) -> None:
            seen.extend(weakref.ref(x) for x in arriving)
            counts.append(sum(each() is not None for each in seen))
            super().__init__(leaving, target, arriving, source, group)

    with patch.object(ring_attention, "_Exchange", Counted):
        with patch.object(torch.autograd, "grad", lambda *_: []):
            around(lengths, None, WIDTH, torch.float64)
        forward = max(counts)
        around(lengths, None, WIDTH, torch.float64)
    return forward, max(counts)


def errors(window: int | None, value_width: int, *, gather: bool) -> list[float]:
    """Relative errors of output and gradients in bfloat16, the largest of any rank."""
    group = context_group()
    here = places(CUDA_LENGTHS, group.size(), group.rank())
    heads = drawn(CUDA_LENGTHS, value_width, width=64, dtype=torch.bfloat16, device=device())
    exact = with_gradients(
        lambda *each: of_whole_sequences(*each, CUDA_LENGTHS, window), *(x.double() for x in heads)
    )
    found = around(CUDA_LENGTHS, window, value_width, torch.bfloat16, gather=gather, width=64)
    pairs = zip(found, (x.cpu()[here] for x in exact), strict=True)
    own = torch.stack([(ours.double() - theirs).norm() / theirs.norm() for ours, theirs in pairs]).to(
        device()
    )
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    return own.tolist()


def steps(family: str, attention: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of three steps in bfloat16."""
    parallel = ParallelConfig(context=dist.get_world_size(), context_attention=attention)
    divide_world(parallel)
    model = tiny_model(family, **MODELS[family])
    optimizer = OptimizerConfig(lr=1e-3, warmup_steps=0)
    trainer = Trainer(model.config, hf_state(model), optimizer, dtype=torch.bfloat16, parallel=parallel)
    results = [
        trainer.train_step(pack(random_samples([5, 17, 2, 32, 9, 60], seed=step), 80), TIS, policy_version=3)
        for step in range(3)
    ]
    return [(result.loss, result.grad_norm) for result in results]


def main() -> None:
    """Print from rank 0 as JSON what each way gets."""
    init_world()
    report = {
        "errors": {
            f"window={window} value={width}": [
                errors(window, width, gather=False), errors(window, width, gather=True)
            ]
            for window in (None, 100, 700)
            for width in (64, 48)
        },
        "steps": {family: [steps(family, way) for way in ("ring", "gather")] for family in MODELS},
    }  # fmt: skip
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(report) + "\n")
    close_world()


if __name__ == "__main__":
    main()
