"""The state of megatron-core's distributed optimizer in checkpoints: each rank saves what it has.

megatron-core gathers the whole state in the host's memory of every data-parallel rank before it saves it.
Here a rank saves its range of a parameter as boxes: a range of a matrix is part of a row, whole rows, and
part of another. Names and shapes in the files are megatron-core's own, whose loading reads any boxes."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from learner.backends.megatron.core.megatron_core import (
    DistributedOptimizer,
    ShardedTensor,
    ShardedTensorFactory,
    extract_sharded_tensors_and_factories,
    nested_values,
)
from learner.backends.megatron.optimizer.shards import main_shards
from learner.backends.update.bf16_adamw import MOMENTS

STATE = "optimizer.state"
"""Begins the names of the state in the files."""
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes by dimension."""


def save_own_shards(optimizer: DistributedOptimizer) -> None:
    """Have every rank save its own part of the state, and load into tensors that padding does not shift."""
    sharded = optimizer.sharded_state_dict

    def own_or_all(weights: Mapping[str, Any], is_loading: bool = False, **settings: Any) -> dict[str, Any]:
        if is_loading:
            return sharded(weights, is_loading=True, **settings)  # type: ignore[no-any-return]  # untyped
        kind = {"param_state_sharding_type": "fully_reshardable"}
        return {**optimizer.state_dict(), "param_state": _own_shards(optimizer, weights), **kind}

    optimizer.sharded_state_dict = own_or_all
    optimizer.get_parameter_state_dp_zero = lambda **_: _whole_buffers(optimizer)


def boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    """Yield the boxes, in order, that elements `start` to `end` of a tensor of that shape consist of."""
    if start == end:
        return
    if len(shape) < 2:
        yield ((start,), (end - start,)) if shape else ((), ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), end // row
    if first > last:  # the slice lies in one row
        yield from _in_row(shape, last, start, end)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, last * row, end)


def _in_row(shape: tuple[int, ...], number: int, start: int, end: int) -> Iterator[Box]:
    before = number * prod(shape[1:])
    for offsets, sizes in boxes(shape[1:], start - before, end - before):
        yield (number, *offsets), (1, *sizes)


def _own_shards(optimizer: DistributedOptimizer, weights: Mapping[str, Any]) -> dict[int, ShardedTensor]:
    """Return this rank's part of the state, cut and named as the weights are. It is a dict as in loading, or
    megatron-core could not merge what a rank without parameters has saved."""
    entries, _ = extract_sharded_tensors_and_factories(weights)
    entry_of = {entry.data: entry for entry in nested_values(entries)}
    parts = (
        part
        for parameter, main, start in main_shards(optimizer)
        for key, tensor in {"param": main, **optimizer.optimizer.state[main]}.items()
        if key != "step"  # is saved once for all
        for part in _shards(entry_of[parameter], key, tensor.detach(), start)
    )
    return dict(enumerate(parts))


def _shards(entry: Any, key: str, mine: Tensor, start: int) -> Iterator[ShardedTensor]:
    """Yield `mine`, the elements from `start` on of a state that is cut and named like the weight `entry`."""
    place = 0
    for whole in _wholes(entry, f"{STATE}.{key}.{entry.key}", mine.dtype):
        size = whole.data.numel()
        first, last = max(start, place), min(start + len(mine), place + size)
        shape = tuple(whole.data.shape)
        for offsets, sizes in boxes(shape, first - place, max(first, last) - place):
            end = first + prod(sizes)
            yield _part(whole, offsets, mine[first - start : end - start].view(sizes))
            first = end
        place += size


def _wholes(entry: Any, key: str, dtype: torch.dtype) -> list[ShardedTensor]:
    """Return what a state is in the files, without contents: parts that lie one after the other in it."""
    empty = torch.empty(entry.data.shape, dtype=dtype, device="meta")
    if not isinstance(entry, ShardedTensorFactory):
        return [replace(entry, key=key, data=empty, dtype=dtype)]
    parts = list(nested_values(entry.build_fn(key, empty, entry.replica_id, None)))
    starts = [part.data.storage_offset() for part in parts]
    if starts != sorted(starts) or not all(part.data.is_contiguous() for part in parts):
        raise NotImplementedError(f"{entry.key} is saved in parts that do not follow one another")
    return parts


def _part(whole: ShardedTensor, offsets: tuple[int, ...], mine: Tensor) -> ShardedTensor:
    prepended = whole.prepend_axis_num
    places = zip(whole.global_offset[prepended:], offsets, strict=True)
    data = mine.view(*[1] * prepended, *mine.shape)
    return replace(
        whole,
        data=data,
        local_shape=tuple(data.shape),
        global_offset=(*whole.global_offset[:prepended], *(place + offset for place, offset in places)),
        axis_fragmentations=None,
        prepend_axis_num=0,
        replica_id=(*whole.replica_id[:2], 0),
    )


def _whole_buffers(optimizer: DistributedOptimizer) -> dict[int, dict[Any, dict[str, Tensor]]]:
    """Return what megatron-core loads into. Its own leaves out the padding between buckets, by which
    parameters of later ones would be read as parts of one another."""
    return {
        number: {dtype: {key: torch.zeros(buffer.numel) for key in ("param", *MOMENTS)} for dtype in ranges}
        for number, (ranges, buffer) in enumerate(zip(optimizer.gbuf_ranges, optimizer.buffers, strict=True))
    }
