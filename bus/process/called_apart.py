"""Calls a function in a process of its own, which ends with the answer: what the function loads, as torch and
transformers do some hundred megabytes, does not stay in this one."""

import os
import pickle
import sys
from collections.abc import Callable
from typing import TypeVar

from bus.errors import SluiceError
from bus.process.child_process import ask_child, module_command
from bus.process.host_limits import MemoryKills

T = TypeVar("T")


class NoAnswerError(SluiceError):
    """Says how a process ended that was to answer, and its last words."""


async def called_apart(function: Callable[..., T], *arguments: object, limit_s: float, what: str) -> T:
    """Return what a function of a module returns for these arguments, all of which pickle takes.

    Raises the `SluiceError` that it raises, and one that names `what` it does where it does not return within
    `limit_s` or its process ends otherwise."""
    try:
        return await answered_apart(function, *arguments, limit_s=limit_s)
    except TimeoutError as error:
        raise SluiceError(f"{what} did not end within {limit_s:g} s: is this host very busy?") from error
    except NoAnswerError as error:
        raise SluiceError(
            f"{what}: its process ended with {error}: look whether this host has memory left"
        ) from error


async def answered_apart(function: Callable[..., T], *arguments: object, limit_s: float) -> T:
    """Do what `called_apart` does, for a caller with words of its own: raises `TimeoutError` after `limit_s`,
    and `NoAnswerError` where the process ends otherwise."""
    kills = MemoryKills()
    asked = pickle.dumps((function, arguments))
    told = await ask_child(module_command("bus.process.called_apart"), asked, limit_s=limit_s)
    if told.status:
        [last] = told.errors.strip().splitlines()[-1:] or ["it said nothing"]
        raise NoAnswerError(f"{kills.ending(told.status)} ({last})")
    found: T | SluiceError = pickle.loads(told.answer)
    if isinstance(found, SluiceError):
        raise found
    return found


def main() -> None:
    """Write what the function on standard input returns, or which `SluiceError` it raises. What it prints
    goes to the standard error."""
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    function, arguments = pickle.load(sys.stdin.buffer)
    try:
        found = function(*arguments)
    except SluiceError as error:
        found = error
    pickle.dump(found, results)
    results.flush()


if __name__ == "__main__":
    main()
