"""How far a long piece of work is: a bar on a terminal, now and then a line of the log elsewhere.

Work that is done within two seconds shows nothing."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import structlog

from bus.config import LOG_FORMAT_VARIABLE

if TYPE_CHECKING:
    from rich.progress import Progress

log = structlog.get_logger()
T = TypeVar("T")
Advance = Callable[[float], None]
SHOWN_AFTER_S = 2.0
"""Seconds after which a piece of work counts as long."""
LINE_S = 10.0
"""Seconds between two lines of the log about the same work."""
BAR_S = 0.1
"""Seconds between two looks how far the work is that a bar shows."""


def uncounted(_: float) -> None:
    """Count nothing: for work that nobody is shown."""


@contextmanager
def long_work(
    what: str, total: float | None = None, *, done: float = 0.0, measured: Callable[[], float] | None = None
) -> Iterator[Advance]:
    """Show how far the work inside is, from any thread; of a learner's ranks only the first does.

    Args:
        what: the work in words, such as "loading the weights".
        total: its amount in any unit; without it only the seconds are shown.
        done: how much of it was done before, such as the steps before a restart.
        measured: returns how much is done, where the work does not call what this yields.

    Yields a function that is called with each amount that was done."""
    work = _Work(what, total, done, measured)
    if os.environ.get("RANK", "0") != "0":
        yield work.advance
        return
    ended = threading.Event()
    showing = threading.Thread(target=_show, args=(work, ended), name=f"progress of {what}", daemon=True)
    showing.start()
    failed = True
    try:
        yield work.advance
        failed = False
    finally:
        ended.set()
        showing.join()
        if work.shown and not failed:
            log.info("work_done", work=what, seconds=round(work.elapsed_s, 1))


def tracked(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Yield the items, and show how many of them the caller is done with."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with long_work(what, total) as advance:
        for item in items:
            yield item
            advance(1)


class _Work:
    def __init__(
        self, what: str, total: float | None, done: float, measured: Callable[[], float] | None
    ) -> None:
        self.what = what
        self.total = total
        self.shown = False
        self._before = self._done = done
        self._measured = measured
        self._began_s = time.monotonic()

    def advance(self, amount: float) -> None:
        self._done += amount

    def done(self) -> float:
        done = self._done if self._measured is None else self._measured()
        return done if self.total is None else min(done, self.total)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def figures(self) -> dict[str, float]:
        figures = {"seconds": round(self.elapsed_s, 1)}
        if not self.total:
            return figures
        done = self.done()
        figures["percent"] = round(100 * done / self.total)
        if done > self._before:
            pace = (done - self._before) / self.elapsed_s
            figures["left_s"] = round((self.total - done) / pace, 1)
        return figures


def _show(work: _Work, ended: threading.Event) -> None:
    if ended.wait(SHOWN_AFTER_S):
        return
    work.shown = True
    if _has_terminal():
        with _BARS.bar(work) as update:
            while not ended.wait(BAR_S):
                update()
        return
    while True:
        log.info("work_goes_on", work=work.what, **work.figures())
        if ended.wait(LINE_S):
            return


def _has_terminal() -> bool:
    return (
        sys.stderr.isatty()
        and os.environ.get(LOG_FORMAT_VARIABLE) != "json"
        and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    )


class _Bars:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown: Progress | None = None

    @contextmanager
    def bar(self, work: _Work) -> Iterator[Callable[[], None]]:
        with self._lock:
            shown = self._shown = self._shown or _started_bars()
            task = shown.add_task(work.what, total=work.total)
        try:
            shown.update(task, completed=work.done())
            yield lambda: shown.update(task, completed=work.done())
        finally:
            with self._lock:
                shown.remove_task(task)
                if not shown.tasks:
                    shown.stop()
                    self._shown = None


def _started_bars() -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    bars = Progress(*columns, TextColumn("left"), console=Console(stderr=True), transient=True)
    bars.start()
    return bars


_BARS = _Bars()
