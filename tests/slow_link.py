"""A link of a limited rate between a client and a server, as between two sites."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

PIECE_BYTES = 1 << 16


@asynccontextmanager
async def slow_link(port: int, *, bytes_per_s: float) -> AsyncIterator[int]:
    """Yield a port of this host that leads to `port`, from where at most `bytes_per_s` come back.

    It carries one connection after another."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        carrying = asyncio.create_task(_carry(listener, port, bytes_per_s))
        try:
            yield listener.getsockname()[1]
        finally:
            carrying.cancel()
            with suppress(asyncio.CancelledError):
                await carrying


async def _carry(listener: socket.socket, port: int, bytes_per_s: float) -> None:
    loop = asyncio.get_running_loop()
    while True:
        near, _ = await loop.sock_accept(listener)
        with near, socket.socket() as far:
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE_BYTES)  # the server holds what waits
            for end in (near, far):
                end.setblocking(False)
            await loop.sock_connect(far, ("127.0.0.1", port))
            copies = [
                asyncio.create_task(_copy(near, far, None)),
                asyncio.create_task(_copy(far, near, bytes_per_s)),
            ]
            try:
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for copy in copies:
                    copy.cancel()
                await asyncio.gather(*copies, return_exceptions=True)


async def _copy(source: socket.socket, target: socket.socket, bytes_per_s: float | None) -> None:
    loop = asyncio.get_running_loop()
    free_at = loop.time()
    with suppress(ConnectionError):
        while data := await loop.sock_recv(source, PIECE_BYTES):
            if bytes_per_s is not None:
                free_at = max(free_at, loop.time()) + len(data) / bytes_per_s
                await asyncio.sleep(free_at - loop.time())
            await loop.sock_sendall(target, data)
