"""Memory of the host: copies to and from the device that neither waits for, and copies of a rank's state."""

import mmap
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate
from math import prod

import numpy as np
import torch
from torch import Tensor

from bus.errors import TrainingError
from storage.weights.tensors import TORCH_DTYPES, WORD, HostTensor

CUDA_SUCCESS = 0
ALIGNED_BYTES = 64
"""Tensors start at multiples of so many bytes."""
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
"""No shared memory, of which containers often have little."""
LOCKED_BYTES = 256 << 20
"""So much is locked at a time beside training: other calls of CUDA have to wait for each."""
LOCKING_THREADS = 4
LEFT_BYTES = 256 << 20
"""So much of a state on a CPU is copied at once when it is to change, without waiting for the disk."""
LEFT_TIMEOUT_S = 60.0
"""After so long a wait for a disk the rest is copied, however much it is."""
LOCKING_TIMEOUT_S = 600.0
"""Locking takes a second for some gigabytes; one that is not done by then has failed."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to `device` behind the work it has; a no-op when already there.

    From memory that the operating system may move, CUDA would first wait for all of that work. Torch keeps
    the pinned copy until it has been read."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def host_memory(wanted: Iterable[tuple[Sequence[int], torch.dtype]], *, page_locked: bool) -> list[Tensor]:
    """Return zeros of these shapes and dtypes, all in one piece of the host's memory.

    Locked, the pages stay where they are, so that copies run beside the work. They take no more than the
    tensors: what torch pins is rounded up to a power of two bytes, tensor by tensor, and never given back.
    Each tensor has a storage of its own, so that it can be saved without the others.
    Raises `TrainingError` when the system does not let so much be locked."""
    wanted = list(wanted)
    memory = _pages(padded_bytes(wanted))
    if page_locked:
        lock_pages(memory)
    return _tensors_in(memory, wanted)


def padded_bytes(wanted: Iterable[tuple[Sequence[int], torch.dtype]]) -> int:
    """Return the bytes that such tensors take one after another."""
    return sum(_padded(prod(shape) * dtype.itemsize) for shape, dtype in wanted)


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


def _pages(size_bytes: int) -> np.ndarray:
    pages = mmap.mmap(-1, page_bytes(size_bytes), flags=PRIVATE)
    with suppress(AttributeError, OSError):  # not every system has large ones: they are locked sooner
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


def _tensors_in(memory: np.ndarray, wanted: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in wanted]
    starts = accumulate(map(_padded, sizes), initial=0)
    return [
        torch.from_numpy(memory[start : start + size]).view(dtype).view(tuple(shape))
        for start, size, (shape, dtype) in zip(starts, sizes, wanted, strict=False)  # one start is left
    ]


def page_bytes(size_bytes: int) -> int:
    """Return the number of bytes of the pages that so many bytes lie on, one at least."""
    return max(1, -(-size_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE


def lock_pages(memory: np.ndarray) -> None:
    """Lock the memory for as long as it lives; the device must be done with it then. Raises `TrainingError`
    when the system does not let so much be locked."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
    if error != CUDA_SUCCESS:
        raise TrainingError(
            f"CUDA could not lock {memory.nbytes:,} bytes of the host's memory (error {error}): "
            "free some, or raise the limit of this process (ulimit -l, the container's memory)"
        )
    unlocking = weakref.finalize(memory, cudart.cudaHostUnregister, memory.ctypes.data)
    unlocking.atexit = False  # then CUDA may be gone


class StateCopies:
    """Copies of tensors, which may change after `keep`.

    Those on a GPU are copied beside its further work. Those on the host are copied when their turn to be
    written comes, or else by `keep`, which on a CPU first waits until little is left: a checkpoint takes no
    second state's memory, and the disk is mostly faster than a step."""

    def __init__(
        self, tensors: Sequence[Tensor], copied: Sequence[Tensor | None], arrived: torch.cuda.Event | None, *,
        begun: torch.cuda.Event | None = None, waited_s: float = 0.0,
    ) -> None:  # fmt: skip
        """Hold `tensors`. Those with a copy in `copied` have `arrived` there after the event; the device
        began at the event `begun`."""
        self.waited_s = waited_s
        """Seconds that training has waited for page-locked memory."""
        self.held_up_s = 0.0
        """Seconds for which an update of the weights has waited until little was left to copy."""
        self._begun = begun
        self._sources = tensors if arrived is not None else ()  # the device reads them: nobody may free them
        self._copies = list(copied)
        self._waiting = {n: tensor for n, tensor in enumerate(tensors) if copied[n] is None}
        self._arrived = arrived
        self._change = threading.Condition()

    @property
    def copied_s(self) -> float:
        """Return the seconds in which the device copied, beside training, once all is written."""
        if self._begun is None or self._arrived is None:
            return 0.0
        self._arrived.synchronize()  # a rank may have nothing to write of what it copied
        return float(self._begun.elapsed_time(self._arrived)) / 1000

    def take(self, number: int) -> Tensor:
        """Return the copy of a tensor, once; any thread may call this."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._sources = ()
        with self._change:
            tensor = self._waiting.pop(number, None)
            copy, self._copies[number] = self._copies[number], None
            if copy is None and tensor is not None:
                copy = tensor.clone()
            self._change.notify_all()
        assert copy is not None, f"copy {number} is taken twice"
        return copy

    def keep(self) -> None:
        """Let the tensors change: at once on the host, on a GPU behind the work it has now."""
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)
        with self._change:
            if self._arrived is None:
                began = time.perf_counter()
                self._change.wait_for(self._little_is_left, LEFT_TIMEOUT_S)
                self.held_up_s += time.perf_counter() - began
            for number, tensor in self._waiting.items():
                self._copies[number] = tensor.clone()
            self._waiting = {}

    def end(self) -> None:
        """Forget what nobody has taken: it is not to be written."""
        with self._change:
            self._waiting = {}
            self._change.notify_all()

    def _little_is_left(self) -> bool:
        return sum(tensor.nbytes for tensor in self._waiting.values()) <= LEFT_BYTES


class StateReaders:
    """What still reads a rank's state, which may not change meanwhile."""

    def __init__(self) -> None:
        self.published: list[Callable[[], None]] = []
        """Functions that let the weights change which are being published."""
        self.saved: StateCopies | None = None
        """What a checkpoint copies."""

    def settle(self) -> None:
        """Let the state change: at once on the host, on a GPU behind the work it has now."""
        for let_change in self.published:
            let_change()
        if self.saved is not None:
            self.saved.keep()
        self.published, self.saved = [], None


class LockedMemory:
    """Memory whose pages threads touch and lock, part after part, while other work goes on."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._memory = _pages(size_bytes)
        self.address = self._memory.ctypes.data
        starts = range(0, len(self._memory), LOCKED_BYTES)
        self._parts = [self._memory[start : start + LOCKED_BYTES] for start in starts]
        device = torch.cuda.current_device()
        threads = ThreadPoolExecutor(LOCKING_THREADS, thread_name_prefix="locking")
        self._locking = [threads.submit(_touch_and_lock, part, device) for part in self._parts]
        threads.shutdown(wait=False)

    @property
    def is_locked(self) -> bool:
        return all(part.done() for part in self._locking)

    def tensors(self, wanted: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
        """Return tensors of these shapes and dtypes in it, once all of it is locked. Raises `TrainingError`
        when the system does not let so much be locked."""
        deadline = time.monotonic() + LOCKING_TIMEOUT_S
        for part in self._locking:
            try:
                part.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise TrainingError(
                    f"CUDA has not locked {self.size_bytes:,} bytes of the host's memory for checkpoints "
                    f"after {LOCKING_TIMEOUT_S:.0f} s: free some of the memory"
                ) from None
        return _tensors_in(self._memory, wanted)


def _touch_and_lock(memory: np.ndarray, device: int) -> None:
    memory[:: mmap.PAGESIZE] = 0  # the system makes the pages here, and not while CUDA lets no other call in
    with torch.cuda.device(device):  # else the device of new threads, which may be another rank's
        lock_pages(memory)


def pieces(place: Tensor, source: Tensor, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parts of a tensor with their sources, none of which crosses a border between locked parts: CUDA
    copies to one of them at a time. `place` starts at byte `start` of the memory."""
    if start % LOCKED_BYTES + place.nbytes <= LOCKED_BYTES:
        yield place, source
        return
    to, of = place.reshape(-1).view(torch.uint8), source.contiguous().reshape(-1).view(torch.uint8)
    first = 0
    while first < place.nbytes:
        end = min(place.nbytes, first + LOCKED_BYTES - (start + first) % LOCKED_BYTES)
        yield to[first:end], of[first:end]
        first = end


class CopyBuffers:
    """Page-locked host memory that one checkpoint after another reuses, since to lock it takes seconds."""

    def __init__(self) -> None:
        self._memory: LockedMemory | None = None
        self._wanted: list[tuple[Sequence[int], torch.dtype]] = []
        self._places: list[Tensor] = []
        self._beside: torch.cuda.Stream | None = None

    def prepare(self, tensors: Iterable[Tensor]) -> None:
        """Begin to lock memory for copies of these tensors, or of others that take as much, on threads."""
        if size_bytes := padded_bytes((tensor.shape, tensor.dtype) for tensor in tensors if tensor.is_cuda):
            self._reserve(size_bytes)

    def _reserve(self, size_bytes: int) -> LockedMemory:
        if self._memory is None or size_bytes > self._memory.size_bytes:
            self._memory, self._wanted, self._places = None, [], []  # freed before more is allocated
            self._memory = LockedMemory(size_bytes)
        return self._memory

    @property
    def is_locked(self) -> bool:
        """Tell whether `copies` need not wait for memory that `prepare` began to lock."""
        return self._memory is None or self._memory.is_locked

    def copies(self, tensors: Sequence[Tensor]) -> StateCopies:
        """Begin to copy the tensors, over the copies of the call before, which must be written."""
        tensors = [tensor.detach() for tensor in tensors]
        sources = [tensor for tensor in tensors if tensor.is_cuda]
        if not sources:
            return StateCopies(tensors, [None] * len(tensors), None)
        began = time.perf_counter()
        wanted: list[tuple[Sequence[int], torch.dtype]] = [(each.shape, each.dtype) for each in sources]
        memory = self._reserve(padded_bytes(wanted))
        if wanted != self._wanted:
            self._places, self._wanted = memory.tensors(wanted), wanted
        waited_s = time.perf_counter() - began
        self._beside = self._beside or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._beside.wait_stream(torch.cuda.current_stream())
        begun = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        arrived = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._beside):
            begun.record()
            for place, source in zip(self._places, sources, strict=True):
                for to, of in pieces(place, source, place.data_ptr() - memory.address):
                    to.copy_(of, non_blocking=True)
            arrived.record()
        places = iter(self._places)
        copied = [next(places) if tensor.is_cuda else None for tensor in tensors]
        return StateCopies(tensors, copied, arrived, begun=begun, waited_s=waited_s)


NAMES = {getattr(torch, dtype): name for name, dtype in TORCH_DTYPES.items()}
"""Name of each torch dtype in safetensors."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def host_tensors(state: Mapping[str, Tensor]) -> dict[str, HostTensor]:
    """Return the same memory as words; tensors must be contiguous and on the host."""
    found = {}
    for name, tensor in state.items():
        size = tensor.element_size()
        words = tensor.detach().reshape(-1).view(INTEGERS[size]).numpy().view(WORD[size])
        found[name] = HostTensor(NAMES[tensor.dtype], tuple(tensor.shape), words)
    return found
