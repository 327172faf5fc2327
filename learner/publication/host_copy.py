"""The weights' way from the device to the host: the only part of a publication that training waits for.

Where the ranks share the model, each has some of the tensors on its host (divided_weights.py); else rank 0
has all. On a CPU they lie there already, and are lent from where they are trained (lent_weights.py)."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from learner.backends.contract.backend import NO_TENSORS, Backend, Exported, TrainedAdapters
from learner.distributed.process_group import device
from learner.host_memory.copies import host_memory, host_tensors
from learner.model_directories.lazy_weights import spec_of
from learner.publication.announcement import AdapterBase
from learner.publication.divided_weights import DividedWeights, holders_of
from learner.publication.lent_weights import LentWeights
from learner.publication.whole_model import TensorStream, WholeModel
from storage.weights.tensors import HostTensor, Weights

SHORT_BYTES = 512 << 20
"""Size up to which a CPU copies in the calling thread: waking another takes a tenth as long or more."""


class Copied:
    """Weights on their way to the host."""

    def __init__(
        self, tensors: Callable[[], Mapping[str, HostTensor]], done: torch.cuda.Event | None = None,
        lent: LentWeights | None = None,
    ) -> None:  # fmt: skip
        """`tensors` returns them, after work for which training does not wait. Those that are not copied are
        `lent`."""
        self.done = done
        """Says when the device has copied them; `None` when they are here."""
        self._lent = lent
        self._tensors = tensors

    def wait(self) -> Mapping[str, HostTensor]:
        """Return the weights by Hugging Face name that this rank has, when all are here."""
        if self.done is not None:
            self.done.synchronize()
        return self._tensors()

    @property
    def let_change(self) -> Callable[[], None] | None:
        """Return what is to be called before the weights change; `None` where they may at once."""
        if self._lent is not None:
            return self._lent.let_change
        return None if self.done is None else partial(_wait_on_device, self.done)

    async def arrived(self) -> Mapping[str, HostTensor]:
        """Return the weights as `wait` does, while other work goes on."""
        return await asyncio.to_thread(self.wait)


class HostCopy:
    """Two sets of host buffers that take turns, each in one piece, page-locked where there is a GPU.

    What `take` returned last stays as it is while the next `take` fills the other set. On a GPU the copies
    run beside the training that follows: `Copied.done` says when the weights may change again."""

    def __init__(self, dtype: torch.dtype, whole: WholeModel | None = None) -> None:
        """Copy weights as `dtype`, except adapters that have one of their own. With `whole` those of a text
        model are copied under its names, and its other weights too."""
        self.seconds = 0.0
        """Duration of the latest `take`."""
        self.tensors: int | None = None
        """Number of weights of the latest `take`."""
        self._dtype = dtype
        self._whole = whole
        self._unchanging: tuple[TensorStream, dict[str, HostTensor]] = NO_TENSORS, {}
        """What reads the weights that do not change, and those, beside lent ones."""
        self._sets: list[_Buffers | None] = [None, None]
        self._turn = 0
        self.divided: DividedWeights | None = None
        """The weights that the ranks divide; None where rank 0 has all."""
        self._beside: torch.cuda.Stream | None = None

    @torch.no_grad()
    def take(self, weights: Exported, *, lend: bool = False) -> Copied:
        """Copy the weights as the dtypes to publish: one call for all that this rank has whole. Every rank
        calls this. With `lend` those that lie here as they are published are not copied: whoever changes them
        calls `Copied.let_change` before."""
        began = time.perf_counter()
        weights = weights if self._whole is None else self._whole.exported(weights)
        self._turn = 1 - self._turn
        self.tensors = len(weights.shapes)
        if lend:
            lent = self._lend(weights)
            self.seconds = time.perf_counter() - began
            return lent
        if weights.pieces is not None:
            return self._take_divided(weights, began)
        buffers = self._sets[self._turn]
        if buffers is None or buffers.shapes != weights.shapes:
            buffers = self._sets[self._turn] = _Buffers(weights.shapes, self._dtype, weights.exact)
        on_gpu = device().type == "cuda"
        with self._beside_training() if on_gpu else nullcontext():
            buffers.fill(weights)
            done = _recorded() if on_gpu else None
        self.seconds = time.perf_counter() - began
        words = buffers.words
        return Copied(lambda: words, done)

    def _take_divided(self, weights: Exported, began: float) -> Copied:
        divided, turn = self.divided, self._turn
        if divided is None or divided.shapes != weights.shapes:
            divided = self.divided = DividedWeights(weights, self._dtype)
        divided.take(weights, turn)
        self.seconds = time.perf_counter() - began
        return Copied(partial(divided.arrived, turn))

    def _lend(self, weights: Exported) -> Copied:
        """Lend what lies here as it is published, and copy the rest into memory that later versions do not
        take."""
        if self._unchanging[0] != weights.unchanging:
            read = {name: self._published(weights, name, tensor) for name, tensor in weights.unchanging()}
            self._unchanging = weights.unchanging, host_tensors(read)
        unchanging = self._unchanging[1]
        views = {
            name: view.view(weights.shapes[name])
            for name, view in weights.here.items()
            if view.is_contiguous() and view.dtype == weights.exact.get(name, self._dtype)
        }
        apart = {
            name: shape
            for name, shape in weights.shapes.items()
            if name not in views and name not in unchanging
        }
        copies = _Buffers(apart, self._dtype, weights.exact)
        here = {name: view for name, view in weights.here.items() if name in apart}
        copies.fill(replace(weights, here=here, unchanging=NO_TENSORS))
        lent = LentWeights(host_tensors(views), copies.words)
        found = {**unchanging, **lent.tensors}
        tensors = {name: found[name] for name in weights.shapes}
        return Copied(lambda: tensors, lent=lent)

    def _published(self, weights: Exported, name: str, tensor: Tensor) -> Tensor:
        wanted = tensor.to(weights.exact.get(name, self._dtype), copy=True)
        return wanted.contiguous().view(weights.shapes[name])

    def adapter_base(self, adapters: TrainedAdapters | None) -> AdapterBase | None:
        """Return what published adapters belong to; None where whole weights are published."""
        if adapters is None or adapters.config.publish == "merged":
            return None
        return AdapterBase(adapters.described, partial(self.as_published, adapters))

    def as_published(self, adapters: TrainedAdapters) -> Weights:
        """Return this rank's share of the frozen weights of adapters, in the dtypes to publish. It is called
        on any thread."""
        exact, base, rank = adapters.exact, adapters.base, dist.get_rank()
        holders = holders_of({name: spec_of(base, name).shape for name in sorted(base)})
        mine = [name for name, holder in holders.items() if holder == rank]
        tensors = {name: base[name].to(exact.get(name, self._dtype)).contiguous() for name in mine}
        return Weights.of(0, host_tensors(tensors))

    def _beside_training(self) -> torch.cuda.StreamContext:
        self._beside = self._beside or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._beside.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._beside)


async def copy_weights(host: HostCopy, backend: Backend, thread: Executor) -> Copied:
    """Begin to copy the backend's weights as `take` does, while no other work of torch is under way. Every
    rank calls this. Returns when training may go on, on `thread`, where torch works."""
    alone_on_cpu = device().type == "cpu" and dist.get_world_size() == 1
    if alone_on_cpu and backend.size_bytes <= SHORT_BYTES:
        return _copy(host, backend)
    return await asyncio.get_running_loop().run_in_executor(thread, _copy, host, backend)


def _copy(host: HostCopy, backend: Backend) -> Copied:
    lend = device().type == "cpu" and dist.get_world_size() == 1
    copied = host.take(backend.exported(), lend=lend)
    if copied.let_change is not None:
        backend.before_change(copied.let_change)
    return copied


class _Buffers:
    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, exact: Mapping[str, torch.dtype]
    ) -> None:
        self.shapes = shapes
        wanted = ((shape, exact.get(name, dtype)) for name, shape in shapes.items())
        memory = host_memory(wanted, page_locked=device().type == "cuda")
        self.tensors = dict(zip(shapes, memory, strict=True))
        self.words = host_tensors(self.tensors)
        self._weights: Exported | None = None
        self._sources: list[Tensor] = []
        self._places: list[Tensor] = []
        self._unchanging: Callable[[], Iterator[tuple[str, Tensor]]] | None = None
        """Reads the weights that are here and do not change."""

    def fill(self, weights: Exported) -> None:
        """Copy the weights in; where each goes is found out once, and those that do not change are read
        once."""
        if weights is not self._weights:
            self._weights, self._sources = weights, list(weights.here.values())
            self._places = [self.tensors[name].view(view.shape) for name, view in weights.here.items()]
        if self._sources:
            torch._foreach_copy_(self._places, self._sources, non_blocking=True)
        for name, tensor in weights.rest():
            self.tensors[name].copy_(tensor, non_blocking=True)
        if self._unchanging != weights.unchanging:
            for name, tensor in weights.unchanging():
                self.tensors[name].copy_(tensor)
            self._unchanging = weights.unchanging


def _wait_on_device(done: torch.cuda.Event) -> None:
    torch.cuda.current_stream().wait_event(done)


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
