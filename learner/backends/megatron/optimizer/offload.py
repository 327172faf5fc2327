"""Main weights and moments in the host's memory, where torch's fused AdamW updates them.

megatron-core's `HybridDeviceOptimizer` needs Transformer Engine beside the distributed optimizer, and knows
neither `grad_scale` nor `found_inf`. Here part of the main weights of a `DistributedOptimizer` lie in pinned
memory, and their moments in ordinary memory of the host. In an update their gradients are copied to the host,
bucket by bucket; the host updates a bucket while the next one comes, and the new weights are copied into the
model. The device updates its own part meanwhile.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import AdamW

from learner.backends.megatron.core import DistributedOptimizer, param_is_not_shared, tensor_parallel
from learner.backends.megatron.optimizer.shards import main_shards
from learner.backends.update.bf16_adamw import fused_update
from learner.publication.transfer import host_memory

BUCKET_BYTES = 64 * 2**20
"""Bytes of gradients that are copied and updated at a time."""


_Bucket = list[tuple[Tensor, dict[str, Any]]]
"""Parameters with their groups."""


class _Shard(NamedTuple):
    """This rank's part of a parameter."""

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

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters; `closure` is not supported."""
        if closure is not None:
            raise NotImplementedError("the loss is computed before the update")
        buckets = list(_buckets((p, g) for g in self.param_groups for p in g["params"] if p in self.received))
        grad_scale, found_inf = self.grad_scale.cpu(), self.found_inf.cpu()  # waits for the backward pass
        arrived = [self._receive(bucket) for bucket in buckets]
        super().step()  # the device's part: the others have no `grad`
        for bucket, event in zip(buckets, arrived, strict=True):
            if event is not None:
                event.synchronize()
            for parameter, group in bucket:
                self._update(parameter, group, grad_scale, found_inf)

    def _receive(self, bucket: _Bucket) -> torch.cuda.Event | None:
        """Begin to copy the gradients; the returned event is set when they have arrived."""
        for parameter, _ in bucket:
            self.received[parameter].copy_(self.gradients[parameter], non_blocking=True)
        if not self.gradients[bucket[0][0]].is_cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _update(
        self, parameter: Tensor, group: dict[str, Any], grad_scale: Tensor, found_inf: Tensor
    ) -> None:
        state = self.state[parameter]
        fused_update(
            parameter,
            self.received[parameter],
            (state["exp_avg"], state["exp_avg_sq"]),
            state["step"],
            group,
            grad_scale=grad_scale,
            found_inf=found_inf,
        )


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
            weights = shard.main
            gradient = self.optimizer.received.get(shard.main)
            if gradient is not None and shard.model.dtype != weights.dtype:  # no longer needed, and pinned
                weights = gradient.view(shard.model.dtype)[: len(weights)].copy_(weights)
            shard.model.copy_(weights, non_blocking=True)


@torch.no_grad()
def offload(part: DistributedOptimizer, fraction: float) -> None:
    """Move `fraction` of the main weights to the host. Call it before the optimizer has any state."""
    part.__class__, part.optimizer.__class__ = OffloadedOptimizer, OffloadedAdamW
    mains = part.get_parameters()
    left = fraction * sum(main.numel() for main in mains)
    moved = []
    for main in mains:
        if left <= 0:
            break
        left -= main.numel()
        moved.append(main)
    locked = any(main.is_cuda for main in moved)
    wanted = [(main.shape, main.dtype) for main in moved]
    received, weights = (host_memory(wanted, page_locked=locked) for _ in range(2))
    part.optimizer.gradients, part.optimizer.received = {}, dict(zip(moved, received, strict=True))
    for main, weight in zip(moved, weights, strict=True):
        main.data = weight.copy_(main)


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
