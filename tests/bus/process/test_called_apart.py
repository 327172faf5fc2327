"""Functions that are called in a process of their own."""

import os
import time

import pytest

from bus.codec import decode
from bus.errors import SchemaError, SluiceError
from bus.messages import Prompt
from bus.process.called_apart import called_apart


async def test_another_process_answers_and_its_errors_are_raised_here():
    assert await called_apart(os.getpid, limit_s=60, what="a test") != os.getpid()
    assert await called_apart(print, "what it prints is no answer", limit_s=60, what="a test") is None
    with pytest.raises(SchemaError):
        await called_apart(decode, b"junk", Prompt, limit_s=60, what="a test")


async def test_a_process_that_does_not_answer_is_named_with_what_it_does():
    with pytest.raises(SluiceError, match=r"the sum: its process ended with signal SIGABRT"):
        await called_apart(os.abort, limit_s=60, what="the sum")
    with pytest.raises(SluiceError, match=r"the sum: its process ended with status 1 \(ZeroDivisionError"):
        await called_apart(divmod, 1, 0, limit_s=60, what="the sum")
    with pytest.raises(SluiceError, match=r"the sum did not end within 0.1 s"):
        await called_apart(time.sleep, 60, limit_s=0.1, what="the sum")
