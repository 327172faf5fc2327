"""Runs in SGLang's process, as a custom weight loader: writes only the elements that changed.

Where an element of a Hugging Face tensor lies in the server's parameters, fused and cut for its rank as they
are, only the model's own `load_weights` knows. So that is given tensors which are NaN wherever nothing
changed, and a NaN that it copies leaves what is there. Imports nothing of Sluice."""

import gc
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import torch
from safetensors import safe_open
from torch.overrides import TorchFunctionMode

log = logging.getLogger(__name__)
GAPS, VALUES, WHOLE = "gaps.", "values.", "whole."
"""How tensors of a file are called: of all elements of a dtype together, and those that it has whole. A gap
is how many elements lie between an element and the one before it in its flattened tensor: 16 bits without a
sign, in an int16."""
GAP_BITS = 0xFFFF
CHANGES = "changes"
"""Key in the file's metadata: its JSON gives name, shape and number of elements of each tensor by dtype."""
PIECE_ELEMENTS = 1 << 26
"""Written at a time: what that takes of the device besides stays small."""
TAKEN_ELEMENTS = 1 << 23
"""Gaps and values that come to the device at a time, one tensor's at least. The server waits for each copy:
there are few, and what they take of the device stays small."""
CHECKED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
Named = tuple[str, torch.Tensor]
Entry = tuple[str, list[int], int]
"""A tensor's name and shape, and how many of its elements changed."""


def apply_2(model: Any, named_tensors: Sequence[Named]) -> None:
    """Have the model take a file in the second form there is, whose path is the only tensor: its bytes.
    Raises `RuntimeError` when a NaN got into a parameter: then the model writes weights in another way than
    by copying them, and the server has to be given all of them."""
    [(_, path)] = named_tensors
    began = time.perf_counter()
    with _no_collection():
        spoiled = _applied(model, bytes(path.tolist()).decode())
    log.info("changes of weights written in %.3f s", time.perf_counter() - began)
    if spoiled:
        raise RuntimeError(
            f"{type(model).__name__} does not copy what it loads into {', '.join(sorted(spoiled)[:3])}, so "
            "changes alone cannot be written"
        )


APPLY = f"sluice_changes.{apply_2.__name__}"
"""Name of `apply_2` among SGLang's custom weight loaders. Another form of the file is another name."""


@contextmanager
def _no_collection() -> Iterator[None]:
    """While inside, no garbage is looked for: that may take a third of a second of a pause."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _applied(model: Any, path: str) -> set[str]:
    """Have the model take the file, and return the names of what has a NaN since."""
    device = next(model.parameters()).device
    before = _with_nan(model)
    with safe_open(path, "pt") as file, torch.no_grad(), _in_this_thread(), _NanChangesNothing():
        model.load_weights(_tensors(file, device))
    return _with_nan(model) - before


@contextmanager
def _in_this_thread() -> Iterator[None]:
    """While inside, what this thread has other threads do, it does itself: DeepSeek's tensors are copied by
    a pool, whose threads have not entered a mode of this one."""
    mine, submit = threading.get_ident(), ThreadPoolExecutor.submit

    def done(pool: ThreadPoolExecutor, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != mine:
            return submit(pool, work, *args, **kwargs)
        future: Future[Any] = Future()
        future.set_result(work(*args, **kwargs))  # an error ends the update, as one of a future does
        return future

    with patch.object(ThreadPoolExecutor, "submit", done):
        yield


def _tensors(file: Any, device: torch.device) -> Iterator[Named]:
    """Yield the tensors of a file, NaN where nothing changed, one at a time: each has its full size."""
    for dtype, entries in json.loads(file.metadata()[CHANGES]).items():
        parts = list(_together(entries))
        counts = [sum(count for _, _, count in part) for part in parts]
        gaps, values = (file.get_tensor(kind + dtype).split(counts) for kind in (GAPS, VALUES))
        for part, *on_host in zip(parts, gaps, values, strict=True):
            yield from _of_part(part, *(tensor.to(device) for tensor in on_host))
    for name in file.keys():  # noqa: SIM118 - it is no mapping
        if name.startswith(WHOLE):
            yield name.removeprefix(WHOLE), file.get_tensor(name).to(device)


def _of_part(part: Sequence[Entry], gaps: torch.Tensor, values: torch.Tensor) -> Iterator[Named]:
    counts = [count for _, _, count in part]
    cut = (torch.split(tensor, counts) for tensor in (_positions(gaps, counts), values))
    for (name, shape, _), where, what in zip(part, *cut, strict=True):
        tensor = torch.full(shape, torch.nan, dtype=what.dtype, device=what.device)
        tensor.view(-1).index_copy_(0, where, what)
        yield name, tensor
        del tensor  # before there is the next


def _positions(gaps: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """int64 [N], where the elements lie in their tensors, of which each has so many: all at once. For a
    single tensor, which may be a large one, it is made in one piece of memory."""
    positions = gaps.long().bitwise_and_(GAP_BITS).add_(1).cumsum_(0).sub_(1)
    if len(counts) == 1 or not len(positions):
        return positions
    sizes = torch.tensor(counts, device=gaps.device)
    begins = torch.tensor([0, *accumulate(counts[:-1])], device=gaps.device)
    before = (positions[begins - 1] + 1) * (begins > 0)  # what the tensors before have added up to
    return positions.sub_(before.repeat_interleave(sizes, output_size=len(positions)))


def _together(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Yield the entries of consecutive tensors that come to the device in one copy."""
    together: list[Entry] = []
    taken = 0
    for entry in entries:
        if together and taken + entry[2] > TAKEN_ELEMENTS:
            yield together
            together, taken = [], 0
        together.append(entry)
        taken += entry[2]
    if together:
        yield together


class _NanChangesNothing(TorchFunctionMode):
    """While this context is entered, copying a NaN by `Tensor.copy_` or `tensor[...] = ` leaves what is
    there. What PyTorch's own code copies it does not see: a NaN that gets in by that is found in the end.
    `TorchDispatchMode` would see it, and takes longer over all that is called meanwhile."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__setitem__ and isinstance(args[2], torch.Tensor):
            part = args[0][args[1]]
            if part.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr():  # no copy of it
                return self.__torch_function__(torch.Tensor.copy_, types, (part, args[2]))
        if func is not torch.Tensor.copy_ or not args[1].is_floating_point():
            return func(*args, **(kwargs or {}))
        target, source = args[:2]
        pieces = [(target, source)]
        if target.numel() > PIECE_ELEMENTS:
            rows = max(1, PIECE_ELEMENTS * target.shape[0] // target.numel())
            pieces = [*zip(target.split(rows), source.expand_as(target).split(rows), strict=True)]
        for old, new in pieces:
            torch.where(new.isnan(), old, new.to(old.dtype), out=old)
        return target


def _with_nan(model: Any) -> set[str]:
    """Return the names of the parameters and buffers that have a NaN somewhere."""
    device = next(model.parameters()).device
    largest = {
        name: tensor.detach().amax().to(device, torch.float64)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.dtype in CHECKED and tensor.numel()
    }
    found = torch.stack(list(largest.values())).isnan().tolist()
    return {name for name, is_nan in zip(largest, found, strict=True) if is_nan}
