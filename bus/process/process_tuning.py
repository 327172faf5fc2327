"""Settings of a whole process: when garbage is collected, how threads take turns, what memory is kept."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_INTERVAL_S = 0.0002
"""Seconds after which a busy thread has to release the GIL. An append releases the GIL some twenty times and
then waits this long; Python's default is 5 ms. With many threads the frequent wake-ups would cost more."""
TURNS_S = 0.001
"""The same for a process whose event loop shares the GIL with threads that compute: at each turn the loop may
have to wait so long."""
KEPT_BYTES = 64 << 20
"""Bytes of freed memory that the process keeps: about what one batch of messages takes."""
COLLECT_EVERY = 20_000
"""New objects between two collections. Decoding makes many objects that live until they are stored or trained
on, none of them in a cycle. With Python's default of 700 a shard spends a tenth of its time collecting."""
_thresholds: list[tuple[int, int, int]] = []
"""Thresholds found by each context that was entered; the first ones are Python's own."""
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Options of mallopt(3)."""


@contextmanager
def few_collections() -> Iterator[None]:
    """Collect garbage only among new objects, and rarely, while inside. Collecting among all objects of torch
    and transformers stops a process for half a second."""
    gc.collect()  # garbage from before would never be freed once it is frozen
    with _older_ones_are_left():
        yield


@contextmanager
def no_collections() -> Iterator[None]:
    """Collect no garbage while inside, where large libraries are loaded.

    Hardly any of their objects is garbage, and to look at all of them again and again takes as long as a
    third of the loading itself."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def quick_turns() -> Iterator[None]:
    """Have threads that compute give the GIL to the event loop soon, while inside."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(min(interval, TURNS_S))
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


@contextmanager
def paced() -> Iterator[None]:
    """Collect rarely, switch threads fast and keep freed memory while inside: for a process that stores."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _keep_memory()
    try:
        with _older_ones_are_left():
            yield
    finally:
        sys.setswitchinterval(interval)


@contextmanager
def _older_ones_are_left() -> Iterator[None]:
    """Exclude older objects from collections and collect rarely, until every context has been left."""
    _thresholds.append(gc.get_threshold())
    before = _thresholds[0]
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY, *before[1:])
    try:
        yield
    finally:
        _thresholds.pop()
        if not _thresholds:
            gc.set_threshold(*before)
            gc.unfreeze()


def collect_older() -> None:
    """Collect garbage among all objects, also those that are left out until a context of this module is left:
    large memory may lie in a cycle."""
    gc.unfreeze()
    gc.collect()
    if _thresholds:
        gc.freeze()


def _keep_memory() -> None:
    """Keep freed memory, which the system would otherwise clear for each message: a sixth of storing time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # only the GNU C library has it
        mallopt(_MMAP_THRESHOLD, KEPT_BYTES // 2)
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_TOP_PAD, KEPT_BYTES // 4)


def return_freed_memory() -> None:
    """Give the system what the C library keeps of freed memory, where it lies between memory in use.

    Tensors of a megabyte or so that one thread after another makes and frees leave the process several times
    as large as what it uses."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # only the GNU C library has it
        trim(0)
