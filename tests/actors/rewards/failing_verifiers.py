"""Verifiers that fail by the words of an answer: they run in processes of their own."""

import os
import signal
import time


def prepare() -> None:
    """Need nothing."""


def verify(text: str) -> float:
    """Do what the text says; 0.5 for any other."""
    what, _, argument = text.partition(" ")
    if what == "raise":
        raise KeyError(argument)
    if what == "exit":
        raise SystemExit(3)
    if what == "hang":
        time.sleep(60)
    if what == "signal":
        os.kill(os.getpid(), int(argument))
    if what == "grow":
        return float(len(bytearray(64 << 30)))
    if what == "segfault":
        signal.raise_signal(signal.SIGSEGV)
    return 0.5
