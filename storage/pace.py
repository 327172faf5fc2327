"""What a whole process sets so that its threads work beside its event loop: the GIL, collections, memory."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_INTERVAL_S = 0.0002
"""A thread that releases the GIL gets it back only after this from a busy one; an append releases it some
twenty times, a large delta some ten thousand times, and Python's default is 5 ms."""
KEPT_BYTES = 64 << 20
"""Memory that was freed and is kept for what comes next: about what one batch of messages takes."""
COLLECT_EVERY = 20_000
"""New objects between two collections. Decoding makes many that live until they are stored, none in a cycle,
and at Python's default of 700 a tenth of the time goes to looking at them."""
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Of mallopt(3)."""


@contextmanager
def brisk() -> Iterator[None]:
    """While inside, threads of this process take turns soon, and collections look at what is new only.

    To look at all that torch and transformers consist of stops a process for half a second."""
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        sys.setswitchinterval(interval)


@contextmanager
def paced() -> Iterator[None]:
    """As `brisk`, and memory that was freed is kept for what comes next; that stays so."""
    _keep_memory()
    with brisk():
        yield


def _keep_memory() -> None:
    """Given back, it would be cleared anew by the system for each message: a sixth of the time of storing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # only the GNU library has it
        mallopt(_MMAP_THRESHOLD, KEPT_BYTES // 2)
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_TOP_PAD, KEPT_BYTES // 4)
