"""Main weights and moments in the host's memory, where torch's fused AdamW updates them.

megatron-core's `HybridDeviceOptimizer` needs Transformer Engine beside the distributed optimizer, and knows
neither `grad_scale` nor `found_inf`. Here part of the main weights of a `DistributedOptimizer` lie in pinned
memory, and their moments in ordinary memory of the host. In an update their gradients are copied to the host,
bucket by bucket; the host updates a bucket while the next one comes, and the new weights are copied into the
model. The device updates its own part meanwhile.

With a directory both lie in a file there. An update reads what belongs to the next bucket and writes what
belonged to the last one while it computes with a bucket, so that memory has three of them."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import AdamW

from learner.backends.megatron.core.megatron_core import (
    DistributedOptimizer,
    param_is_not_shared,
    tensor_parallel,
)
from learner.backends.megatron.optimizer.shards import main_shards
from learner.backends.megatron.optimizer.state_file import StateFile, Transfer
from learner.backends.update.bf16_adamw import MOMENTS, fused_update
from learner.host_memory.copies import host_memory

BUCKET_BYTES = 64 * 2**20
"""Bytes of gradients that are copied and updated at a time."""
MAIN_AND_MOMENTS = ("main", *MOMENTS)
SLOTS = 3
"""Buckets of a file that memory has at a time: one comes, one is updated, one leaves."""
_Bucket = list[tuple[Tensor, dict[str, Any]]]
"""Parameters with their groups."""
_Updated = tuple[Tensor, dict[str, Any], Tensor, Tensor, Tensor]
"""A parameter, its group, its weights and its two moments."""


class _Shard(NamedTuple):
    main: Tensor
    """float32 [n], the main weights, which the optimizer updates."""
    gradient: Tensor
    """float32 [n], on the device."""
    model: Tensor
    """[n], the weights of the forward pass, on the device."""


class OffloadedAdamW(AdamW):
    """Torch's AdamW, some of whose parameters lie on the host and have their gradients on the device."""

    grad_scale: Tensor
    found_inf: Tensor
    gradients: dict[Tensor, Tensor]
    """Gradients of the parameters on the host, where the backward pass left them."""
    received: dict[Tensor, Tensor]
    """The same, pinned on the host."""
    dtypes: dict[Tensor, torch.dtype]
    """What the model has of each parameter."""
    updated: dict[Tensor, Tensor]
    """New weights of parameters on the host, until the model has them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise NotImplementedError("the loss is computed before the update")
        buckets = list(_buckets((p, g) for g in self.param_groups for p in g["params"] if p in self.received))
        grad_scale, found_inf = self.grad_scale.cpu(), self.found_inf.cpu()  # waits for the backward pass
        arrived = [self._receive(bucket) for bucket in buckets]
        super().step()  # the device's part: the others have no `grad`
        for bucket, event in zip(self._in_memory(buckets), arrived, strict=True):
            if event is not None:
                event.synchronize()
            for parameter, group, *state in bucket:
                step = self.state[parameter]["step"]
                fused_update(
                    state[0], self.received[parameter], state[1:], step, group,
                    grad_scale=grad_scale, found_inf=found_inf,
                )  # fmt: skip
                self._hand_on(parameter, state[0])

    def _receive(self, bucket: _Bucket) -> torch.cuda.Event | None:
        for parameter, _ in bucket:
            self.received[parameter].copy_(self.gradients[parameter], non_blocking=True)
        if not self.gradients[bucket[0][0]].is_cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _in_memory(self, buckets: Sequence[_Bucket]) -> Iterator[list[_Updated]]:
        for bucket in buckets:
            yield [(p, group, p, *(self.state[p][name] for name in MOMENTS)) for p, group in bucket]

    def _hand_on(self, parameter: Tensor, weights: Tensor) -> None:
        """Put the new weights where the device gets them from, in the model's dtype."""
        if (dtype := self.dtypes[parameter]) != weights.dtype:  # the gradient is used up, and pinned
            weights = self.received[parameter].view(dtype)[: len(weights)].copy_(weights)
        self.updated[parameter] = weights

    def settle_state(self) -> None:
        """Bring the state, which a checkpoint was loaded into, to where it belongs."""

    def give_up(self) -> None:
        """Give the memory of the state on the host back; the optimizer is of no use afterwards."""
        for parameter in self.received:
            parameter.data = torch.empty(0)
        for held in (self.received, self.updated, self.gradients, self.state):
            held.clear()


class FiledAdamW(OffloadedAdamW):
    """The same, with weights and moments in a file."""

    file: StateFile
    places: dict[Tensor, int]
    """Where the weights of each parameter begin in the file; its moments follow, one after the other."""

    def _in_memory(self, buckets: Sequence[_Bucket]) -> Iterator[list[_Updated]]:
        sizes = [len(MAIN_AND_MOMENTS) * sum(p.numel() for p, _ in bucket) for bucket in buckets]
        starts = [self.places[bucket[0][0]] for bucket in buckets]
        # A slot is as large as its own buckets want: one tensor is often larger than all others together.
        memory = [torch.empty(max(sizes[n::SLOTS])) for n in range(min(SLOTS, len(sizes)))]
        slots = [memory[n % SLOTS][:size] for n, size in enumerate(sizes)]
        leaving: list[Transfer] = []
        coming = self.file.read(slots[0], starts[0])
        for number, bucket in enumerate(buckets):
            coming.wait()
            if number + 1 < len(buckets):
                if number + 1 >= SLOTS:  # what was there has been computed with, and is being written
                    leaving[number + 1 - SLOTS].wait()
                coming = self.file.read(slots[number + 1], starts[number + 1])
            yield list(self._views(bucket, slots[number], starts[number]))
            leaving.append(self.file.write(slots[number], starts[number]))
        for transfer in leaving:
            transfer.wait()

    def _views(self, bucket: _Bucket, slot: Tensor, start: int) -> Iterator[_Updated]:
        for parameter, group in bucket:
            first, size = self.places[parameter] - start, parameter.numel()
            main, mean, square = torch.split(slot[first : first + len(MAIN_AND_MOMENTS) * size], size)
            yield parameter, group, main, mean, square

    def _hand_on(self, parameter: Tensor, weights: Tensor) -> None:
        """Keep a copy of the new weights, whose memory another bucket gets."""
        weights_of_model = self.received[parameter].view(self.dtypes[parameter])[: len(weights)]
        self.updated[parameter] = weights_of_model.copy_(weights)

    def in_file(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the parameter's weights and moments as memory that is mapped to the file."""
        start, size = self.places[parameter], parameter.numel()
        parts = torch.split(self.file.mapped[start : start + len(MAIN_AND_MOMENTS) * size], size)
        return dict(zip(MAIN_AND_MOMENTS, parts, strict=True))

    @torch.no_grad()
    def settle_state(self) -> None:
        """Move moments that loading has put in memory of their own into the file."""
        for parameter in self.places:
            for name, moment in self.in_file(parameter).items():
                if name in MOMENTS:
                    self.state[parameter][name] = moment.copy_(self.state[parameter][name])

    def give_up(self) -> None:
        super().give_up()
        del self.file


class OffloadedOptimizer(DistributedOptimizer):  # type: ignore[misc]  # megatron-core is untyped
    """megatron-core's distributed optimizer, with gradients and weights going to the host and back."""

    def _copy_model_grads_to_main_grads(self) -> None:
        self.optimizer.gradients = {}
        for shard in _shards(self):
            if shard.main in self.optimizer.received:
                self.optimizer.gradients[shard.main] = shard.gradient
            else:
                shard.main.grad = shard.gradient

    def get_main_grads_for_grad_norm(self) -> list[Tensor]:
        """Return the gradients; those of parameters on the host are still on the device."""
        return super().get_main_grads_for_grad_norm() + [  # type: ignore[no-any-return]
            gradient
            for main, gradient in self.optimizer.gradients.items()
            if param_is_not_shared(main)
            and tensor_parallel.param_is_not_tensor_parallel_duplicate(main, getattr(self, "tp_group", None))
        ]

    def _copy_main_params_to_model_params(self) -> None:
        for shard in _shards(self):
            weights = self.optimizer.updated.pop(shard.main, shard.main)
            shard.model.copy_(weights, non_blocking=True)


@torch.no_grad()
def offload(part: DistributedOptimizer, fraction: float, directory: Path | None) -> None:
    """Move `fraction` of the main weights to the host, or to a file in `directory`. Call it before the
    optimizer has any state. Raises `ConfigError` where the directory has no room."""
    optimizer = part.optimizer
    moved = _first_of(part.get_parameters(), fraction)
    part.__class__, optimizer.__class__ = OffloadedOptimizer, OffloadedAdamW
    locked = any(main.is_cuda for main in moved)
    wanted = [(main.shape, main.dtype) for main in moved]
    received = host_memory(wanted, page_locked=locked)
    optimizer.gradients, optimizer.updated = {}, {}
    optimizer.received = dict(zip(moved, received, strict=True))
    optimizer.dtypes = {shard.main: shard.parameter.dtype for shard in main_shards(part)}
    if directory is not None and moved:
        _put_into_file(optimizer, moved, directory)
        return
    for main, weight in zip(moved, host_memory(wanted, page_locked=locked), strict=True):
        main.data = weight.copy_(main)


def _first_of(mains: Sequence[Tensor], fraction: float) -> list[Tensor]:
    left = fraction * sum(main.numel() for main in mains)
    moved = []
    for main in mains:
        if left <= 0:
            break
        left -= main.numel()
        moved.append(main)
    return moved


def _put_into_file(optimizer: FiledAdamW, moved: Sequence[Tensor], directory: Path) -> None:
    """Give the weights, and moments that are zero, their places in a file, in the order of updates."""
    optimizer.__class__ = FiledAdamW
    moved_set = set(moved)
    ordered = [p for group in optimizer.param_groups for p in group["params"] if p in moved_set]
    sizes = [len(MAIN_AND_MOMENTS) * parameter.numel() for parameter in ordered]
    optimizer.file = StateFile(directory, sum(sizes))
    optimizer.places = dict(zip(ordered, accumulate(sizes, initial=0), strict=False))
    for parameter in ordered:
        main, *moments = optimizer.in_file(parameter).values()
        parameter.data = main.copy_(parameter)
        optimizer.state[parameter] = dict(zip(MOMENTS, moments, strict=True))


def _shards(part: DistributedOptimizer) -> Iterator[_Shard]:
    """Find the shards like the methods of megatron-core that are replaced here."""
    for model, main, start in main_shards(part):
        buffer, _, bucket = part.model_param_gbuf_map[model]
        weights = part.buffers[buffer].buckets[bucket].param_data.view(-1)
        in_bucket = part._get_model_param_range_map(model)["gbuf_world_in_bucket"]
        yield _Shard(
            main=main,
            gradient=model.main_grad.view(-1)[start : start + main.numel()].float(),
            model=weights[in_bucket.start : in_bucket.end],
        )


def _buckets(parameters: Iterable[tuple[Tensor, dict[str, Any]]]) -> Iterator[_Bucket]:
    bucket: _Bucket = []
    size = 0
    for parameter, group in parameters:
        bucket.append((parameter, group))
        size += parameter.nbytes
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
