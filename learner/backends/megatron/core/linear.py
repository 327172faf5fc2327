"""Products of layers that tensor-parallel ranks share, while tokens travel between the ranks.

Where ranks share hidden states by tokens, a column-parallel layer needs the tokens of all, and a row-parallel
one gives each rank its tokens of a sum. megatron-core gathers before the product, and adds up behind it. Here
a product is cut by the ranks that tokens belong to: that of a rank's own is computed while others arrive, and
those for the others come first, so that they travel while its own is computed."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from learner.backends.megatron.core.megatron_core import tensor_parallel
from learner.backends.shared import multi_tensor

LINEAR = (tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear)


class OverlappedColumn(tensor_parallel.ColumnParallelLinear):  # type: ignore[misc]  # megatron-core is untyped
    """Multiplies a rank's own tokens while others arrive."""

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, **_: object) -> Tensor:
        output: Tensor = _OfGathered.apply(input, weight, self.tp_group, self.gradient_accumulation_fusion)  # type: ignore[no-untyped-call]
        return output if bias is None else output + bias


class OverlappedRow(tensor_parallel.RowParallelLinear):  # type: ignore[misc]  # megatron-core is untyped
    """Multiplies a rank's own tokens while sums for others travel."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what megatron-core's layer does."""
        if "_forward_impl" in vars(self):  # another product, as in fp8, which exchanges nothing
            return super().forward(input_)  # type: ignore[no-any-return]
        fused = self.gradient_accumulation_fusion
        output: Tensor = _Scattered.apply(input_, self.weight, self.tp_group, fused)  # type: ignore[no-untyped-call]
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias, None


OVERLAPPED = dict(zip(LINEAR, (OverlappedColumn, OverlappedRow), strict=True))


def overlap_exchanges(module: torch.nn.Module) -> None:
    """Have a linear layer exchange tokens beside its products, if ranks share tokens there."""
    if type(module) in OVERLAPPED and module.sequence_parallel and not module.is_expert:
        module.__class__ = OVERLAPPED[type(module)]


class _OfGathered(torch.autograd.Function):
    """The product of all ranks' tokens with a weight."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, weight: Tensor, group: dist.ProcessGroup, fused: bool) -> Tensor:
        ctx.save_for_backward(own, weight)
        ctx.group, ctx.fused = group, fused
        return gathered_product(own, weight.t(), group)[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        own, weight = ctx.saved_tensors
        own_gradient = weight_gradient = None
        if ctx.needs_input_grad[1]:
            whole, arrivals = _gather(own, ctx.group)  # travels first, and the sums behind it
        if ctx.needs_input_grad[0]:
            own_gradient, sums = _begun_sum(gradient, weight, ctx.group)
        if ctx.needs_input_grad[1]:
            for _ in arrivals:
                pass
            weight_gradient = _of_weight(weight, whole, gradient, fused=ctx.fused)
        if own_gradient is not None:
            _add_up(own_gradient, sums)
        return own_gradient, weight_gradient, None, None


class _Scattered(torch.autograd.Function):
    """A rank's tokens of the sum of all ranks' products with a part of a weight."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, group: dist.ProcessGroup, fused: bool) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.group, ctx.fused = group, fused
        own, sums = _begun_sum(inputs, weight.t(), group)
        return _add_up(own, sums)

    @staticmethod
    def backward(ctx: Any, own_gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        gradient, input_gradient = gathered_product(own_gradient, weight, ctx.group)
        weight_gradient = None
        if ctx.needs_input_grad[1]:
            weight_gradient = _of_weight(weight, inputs, gradient, fused=ctx.fused)
        return input_gradient, weight_gradient, None, None


def gathered_product(own: Tensor, matrix: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the tokens of all ranks [T, ..., K], of which this one has `own`, and their product with
    `matrix` [K, N]. Every rank calls this."""
    whole, arrivals = _gather(own, group)
    product = whole.new_empty(*whole.shape[:-1], matrix.shape[1])
    pieces, products = _rows(whole, group), _rows(product, group)
    for rank in (group.rank(), *arrivals):
        torch.mm(pieces[rank], matrix, out=products[rank])
    return whole, product


def _gather(own: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Iterator[int]]:
    """Begin to gather tokens; return them, and a wait for each other rank's, whose number it gives."""
    ranks = group.size()
    own = own.contiguous()
    whole = own.new_empty(ranks * own.shape[0], *own.shape[1:])
    pieces = whole.chunk(ranks)
    begun = []
    for to, source in _partners(group):
        begun.append((source, _exchange(own, to, pieces[source], source, group)))
    pieces[group.rank()].copy_(own)

    def arrivals() -> Iterator[int]:
        for source, works in begun:
            _wait(works)
            yield source

    return whole, arrivals()


def _begun_sum(
    inputs: Tensor, matrix: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, list[tuple[Tensor, Sequence[dist.Work], Tensor]]]:
    """Multiply all tokens [T, ..., K] with a matrix [K, N]; return the product of this rank's tokens, and
    those of other ranks' parts of the sum, which are on their way."""
    pieces = _rows(inputs.contiguous(), group)
    begun = []
    for to, source in _partners(group):
        sent = torch.mm(pieces[to], matrix)
        found = torch.empty_like(sent)
        begun.append((found, _exchange(sent, to, found, source, group), sent))
    own = torch.mm(pieces[group.rank()], matrix)
    return own.view(inputs.shape[0] // group.size(), *inputs.shape[1:-1], matrix.shape[1]), begun


def _add_up(own: Tensor, begun: list[tuple[Tensor, Sequence[dist.Work], Tensor]]) -> Tensor:
    for found, works, _sent in begun:
        _wait(works)
        own += found.view_as(own)
    return own


def _rows(whole: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Return the tokens of each rank as the rows of a matrix."""
    return whole.view(-1, whole.shape[-1]).chunk(group.size())


def _partners(group: dist.ProcessGroup) -> Iterator[tuple[int, int]]:
    """Yield the ranks to which this one sends in turn, each with that from which it receives meanwhile."""
    ranks, rank = group.size(), group.rank()
    for distance in range(1, ranks):
        yield (rank + distance) % ranks, (rank - distance) % ranks


def _exchange(
    sent: Tensor, to: int, found: Tensor, source: int, group: dist.ProcessGroup
) -> Sequence[dist.Work]:
    """Begin to send a tensor to one rank of the group, and to receive one from another."""
    return dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, group=group, group_peer=to),
            dist.P2POp(dist.irecv, found, group=group, group_peer=source),
        ]
    )


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _of_weight(weight: Tensor, inputs: Tensor, gradient: Tensor, *, fused: bool) -> Tensor | None:
    inputs, gradient = inputs.flatten(0, -2), gradient.flatten(0, -2)
    return added_to_main(weight, inputs, gradient) if fused else gradient.t() @ inputs


def added_to_main(weight: Tensor, inputs: Tensor, gradient: Tensor) -> Tensor | None:
    """Add the gradient of a weight to its sum in float32; return what hooks of the data-parallel wrapper wait
    for, whose contents mean nothing."""
    multi_tensor.add_product(weight.main_grad, gradient.t(), inputs)  # type: ignore[attr-defined]
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)
