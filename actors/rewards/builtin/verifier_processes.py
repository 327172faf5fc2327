"""Processes in which verifiers read what a policy wrote, with limits of memory and time."""

import asyncio
import importlib
import multiprocessing
import resource
import signal
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from typing import ParamSpec, TypeVar

from pebble import ProcessExpired, ProcessPool

from actors.rewards.answer_faults import HostFaultError

P = ParamSpec("P")
T = TypeVar("T")
MEMORY_BYTES = 4 << 30
"""Address space of such a process: a number of a billion digits is to end the verification, not the host."""


class DiedError(Exception):
    """The process of a verification ended by itself, as by a fault in compiled code."""


def limit_memory() -> None:
    """Limit the memory of this process to `MEMORY_BYTES`."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if most == resource.RLIM_INFINITY else min(MEMORY_BYTES, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))


class VerifierProcesses:
    """Runs functions in processes that start with the first call. They are forked from a process that has
    `module` loaded, so that to replace a killed one is quick."""

    def __init__(self, *, processes: int, timeout_s: float, module: str, prepare: Callable[[], None]) -> None:
        self._processes = processes
        self._timeout_s = timeout_s
        self._module = module
        self._prepare = prepare
        self._pool: ProcessPool | None = None

    async def call(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Return what a function of a module returns; raises what it raises. Raises `TimeoutError` for a call
        that takes too long, `DiedError` for one that ends its process, and `HostFaultError` where no process
        can be had, or something killed it."""
        try:
            scheduled = self._started().schedule(
                _contained, args=(function, arguments, named), timeout=self._timeout_s
            )
            result: T = await asyncio.wrap_future(scheduled)
        except BrokenProcessPool as error:
            raise HostFaultError(f"no process for a verification could be started: {error}") from error
        except TimeoutError as error:
            raise TimeoutError(f"no result within {self._timeout_s:g} s") from error
        except ProcessExpired as error:
            if error.exitcode in (-signal.SIGKILL, -signal.SIGTERM):
                raise HostFaultError(
                    f"the process of the verification was killed by signal {-error.exitcode}, as a host does "
                    "that has no memory left"
                ) from error
            raise DiedError(f"its process ended with status {error.exitcode}") from error
        return result

    def _started(self) -> ProcessPool:
        if self._pool is None or not self._pool.active:  # a pool gives up if processes end at their start
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([self._module])
            self._pool = ProcessPool(
                max_workers=self._processes,
                initializer=_loaded,
                initargs=(self._module, self._prepare),
                context=context,
            )
        return self._pool

    async def close(self) -> None:
        if self._pool is not None:
            pool, self._pool = self._pool, None
            pool.stop()
            await asyncio.to_thread(pool.join)


def _loaded(module: str, prepare: Callable[[], None]) -> None:
    """Load the module before the time of a call begins, also where the process was forked without it."""
    importlib.import_module(module)
    prepare()


def _contained(function: Callable[..., T], arguments: tuple[object, ...], named: dict[str, object]) -> T:
    """Call the function, whose wish to end the process is a failure like any other."""
    try:
        return function(*arguments, **named)
    except (SystemExit, KeyboardInterrupt) as error:
        raise DiedError(f"it asked for the end of its process: {error!r}") from None
