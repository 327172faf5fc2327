"""Compares two mathematical expressions. It runs in processes of its own, which may be killed at any time."""

import logging

from actors.rewards.builtin.verifier_processes import limit_memory


def prepare() -> None:
    """Limit the memory of this process, and have math_verify not warn that its own time limit is off."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    limit_memory()


def equal(expected: str, found: str) -> bool:
    """Return whether two expressions in LaTeX or plain text are equal; one that means nothing equals none.
    math_verify's own limits of time use SIGALRM, which C code does not heed: whoever calls kills the
    process."""
    from math_verify import parse, verify  # sympy takes a second, and the actor's own process needs none

    wanted, given = (parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in (expected, found))
    return bool(verify(wanted, given, timeout_seconds=None))
