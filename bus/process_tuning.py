"""What a whole process sets for its work: when garbage is looked for, and where it stores while it receives
also how soon threads take turns, and what memory is kept."""

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
"""New objects between two collections. Decoding makes many that live until they are stored or trained on,
none in a cycle, and at Python's default of 700 a tenth of a shard's time goes to looking at them."""
_thresholds: list[tuple[int, int, int]] = []
"""Those that each found who went in: the first one's are Python's own."""
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Of mallopt(3)."""


@contextmanager
def few_collections() -> Iterator[None]:
    """While inside, garbage is looked for among what is new only, and seldom.

    To look at all that torch and transformers consist of stops a process for half a second."""
    gc.collect()  # what is garbage now would stay
    with _older_ones_are_left():
        yield


@contextmanager
def paced() -> Iterator[None]:
    """While inside, few collections, quick turns, and freed memory that stays, for a process that stores."""
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
    """Objects from before are not looked at, others seldom; until all are outside who went in."""
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


def _keep_memory() -> None:
    """Given back, it would be cleared anew by the system for each message: a sixth of the time of storing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # only the GNU library has it
        mallopt(_MMAP_THRESHOLD, KEPT_BYTES // 2)
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_TOP_PAD, KEPT_BYTES // 4)
