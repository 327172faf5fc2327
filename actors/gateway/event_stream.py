"""Answers as server-sent events. Engines hand out whole completions; until then streams are kept alive."""

import asyncio
from collections.abc import Coroutine

from aiohttp import web

from actors.gateway.dialects.base import Dialect
from actors.gateway.dialects.exchange import Ask, Reply
from actors.gateway.dialects.refusal import RefusedError
from bus.waiting import cancelled

HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def streamed(
    request: web.Request, dialect: Dialect, ask: Ask, answer: Coroutine[object, object, Reply], *,
    keep_alive_s: float,
) -> web.StreamResponse:  # fmt: skip
    """Send the answer. Raises `RefusedError` while nothing was sent; a later one is an event.

    A client that leaves cancels this, and with it the answer."""
    pending = asyncio.create_task(answer, name="gateway stream")
    try:
        await asyncio.wait([pending], timeout=keep_alive_s)
        if pending.done():
            pending.result()  # raises before a status was sent
        response = web.StreamResponse(headers=HEADERS)
        await response.prepare(request)
        while not pending.done():
            await response.write(dialect.keep_alive)
            await asyncio.wait([pending], timeout=keep_alive_s)
        await response.write(_rest(dialect, ask, pending))
        await response.write_eof()
        return response
    finally:
        await cancelled(pending)


def _rest(dialect: Dialect, ask: Ask, answered: asyncio.Task[Reply]) -> bytes:
    """Return the events of an answer, or of a refusal that came after the first bytes."""
    try:
        return b"".join(dialect.events(ask, answered.result()))
    except RefusedError as refusal:
        return dialect.error_event(refusal)
