"""Compares two mathematical expressions. It runs in processes of its own, which may be killed at any time."""

import logging
import resource

from math_verify import parse, verify

MEMORY_BYTES = 4 << 30
"""Address space of such a process: a number of a billion digits is to end the comparison, not the host."""


def prepare() -> None:
    """Limit the memory of this process, and have math_verify not warn that its own time limit is off."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if most == resource.RLIM_INFINITY else min(MEMORY_BYTES, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))


def equal(expected: str, found: str) -> bool:
    """Return whether two expressions in LaTeX or plain text are equal; one that means nothing equals none.

    math_verify's own limits of time use SIGALRM, which C code does not heed: whoever calls kills the process.
    """
    wanted, given = (parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in (expected, found))
    return bool(verify(wanted, given, timeout_seconds=None))
