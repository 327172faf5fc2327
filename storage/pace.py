"""What a whole process sets so that it stores quickly while it receives: the GIL, collections, memory."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_INTERVAL_S = 0.0002
"""A thread that releases the GIL gets it back only after this from a busy one; an append releases it some
twenty times, and Python's default is 5 ms. Not for many threads: those that wait all wake so often."""
KEPT_BYTES = 64 << 20
"""Memory that was freed and is kept for what comes next: about what one batch of messages takes."""
COLLECT_EVERY = 20_000
"""New objects between two collections. Decoding makes many that live until they are stored, none in a cycle,
and at Python's default of 700 a tenth of the time goes to looking at them."""
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Of mallopt(3)."""


@contextmanager
def few_collections() -> Iterator[None]:
    """While inside, garbage is looked for among what is new only, and seldom.

    To look at all that torch and transformers consist of stops a process for half a second."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@contextmanager
def paced() -> Iterator[None]:
    """All of it, while inside; what was kept of the memory stays kept."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _keep_memory()
    try:
        with few_collections():
            yield
    finally:
        sys.setswitchinterval(interval)


def _keep_memory() -> None:
    """Given back, it would be cleared anew by the system for each message: a sixth of the time of storing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # only the GNU library has it
        mallopt(_MMAP_THRESHOLD, KEPT_BYTES // 2)
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_TOP_PAD, KEPT_BYTES // 4)
