"""JetStream as nats-py has it, but for answers whose bytes were garbled on the way, and for other domains."""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any

from nats.aio.client import Client
from nats.js.client import JetStreamContext
from nats.js.errors import APIError

from bus.waiting import GarbledAnswerError

INVALID_JSON = 10025
"""Error code of a server that cannot read a request: nats-py writes none that it could not."""
NO_STORE = 10049
"""Error code of a server that cannot create a stream's directory, for one while it still removes it."""
REMOVAL_S = 10.0
"""Longest that a server removes the files of a stream, unless its disk is at fault."""
RETRY_S = 0.1
_Call = Callable[..., Awaitable[Any]]


def _checked(call: _Call) -> _Call:
    """Return the call of nats-py with errors of its parsing, which are of many types, as one of ours.

    `asyncio.wait_for` before Python 3.12 forgets a cancellation that comes together with the answer: the task
    would go on, and whoever cancelled it would wait for ever."""

    @functools.wraps(call)
    async def checked(self: "JetStream", *arguments: Any, **options: Any) -> Any:
        task = asyncio.current_task()
        cancelled_before = task.cancelling() if task is not None else 0
        try:
            return await call(self, *arguments, **options)
        except APIError as error:
            if error.err_code != INVALID_JSON:
                raise
            raise GarbledAnswerError(f"the server could not read the request: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise GarbledAnswerError(f"the server's answer cannot be read: {error!r}") from error
        finally:
            if task is not None and task.cancelling() > cancelled_before:
                raise asyncio.CancelledError

    return checked


class JetStream(JetStreamContext):  # type: ignore[misc]  # nats-py has no types
    """JetStream's requests. They raise `GarbledAnswerError` for an answer that is none: asking again helps.

    Behind a leaf node's link, the bare subjects of keys of nats-py do not pass: they get the prefix of
    `domain`."""

    def __init__(self, client: Client, *, domain: str | None) -> None:
        super().__init__(client, timeout=10, **({} if domain is None else {"domain": domain}))
        self._other_domain = domain is not None

    async def add_stream(self, *arguments: Any, **options: Any) -> Any:
        """Create a stream, once the server has removed what a deleted one of its name left on disk. It
        answers that a stream is deleted before it has removed the directory."""
        deadline = time.monotonic() + REMOVAL_S
        while True:
            try:
                return await self._add_stream(*arguments, **options)
            except APIError as error:
                if error.err_code != NO_STORE or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(RETRY_S)

    async def publish(self, subject: str, *arguments: Any, **options: Any) -> Any:
        if self._other_domain and subject.startswith("$KV."):
            subject = f"{self._prefix}.{subject}"
        return await self._publish(subject, *arguments, **options)

    _publish = _checked(JetStreamContext.publish)
    account_info = _checked(JetStreamContext.account_info)
    stream_info = _checked(JetStreamContext.stream_info)
    _add_stream = _checked(JetStreamContext.add_stream)
    update_stream = _checked(JetStreamContext.update_stream)
    delete_stream = _checked(JetStreamContext.delete_stream)
    purge_stream = _checked(JetStreamContext.purge_stream)
    consumer_info = _checked(JetStreamContext.consumer_info)
    add_consumer = _checked(JetStreamContext.add_consumer)
    delete_consumer = _checked(JetStreamContext.delete_consumer)
    get_msg = _checked(JetStreamContext.get_msg)
    get_last_msg = _checked(JetStreamContext.get_last_msg)
