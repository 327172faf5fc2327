"""Calls of a user's function in a thread that a process which ends leaves behind, whatever it waits for."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(function: Callable[[], T], name: str) -> T:
    """Return what the function returns, or raise what it raises; `name` is the thread's."""
    future: Future[T] = Future()

    def work() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(function())
        except (StopIteration, SystemExit) as error:  # no future can hold one, the other would end the loop
            future.set_exception(RuntimeError(f"{name} raised {error!r}").with_traceback(error.__traceback__))
        except BaseException as error:  # noqa: BLE001  # the caller raises it
            future.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await asyncio.wrap_future(future)
