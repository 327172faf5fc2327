"""A TCP link between processes and a server of this host that is slow, late, silent, broken or garbled on
demand."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

HOST = "127.0.0.1"
PIECE_BYTES = 1 << 16


class FaultyLink:
    """Carries connections from `port` to `server_port` of this host. Faults are attributes, set at any time.

    They hold for every connection, for those that come later too."""

    def __init__(self, server_port: int, *, port: int = 0, bytes_per_s: float | None = None) -> None:
        self.server_port = server_port
        self.bytes_per_s = bytes_per_s
        """Rate of each connection from the server to its client, and half as much back; None: no bound."""
        self.delay_s = 0.0
        """Time for which each piece is held back."""
        self.flows = asyncio.Event()
        """Nothing is carried while it is not set, and no connection is closed."""
        self.flows.set()
        self.garble_pieces = 0
        """Number of next pieces whose bytes are replaced by random ones."""
        self._listener = socket.create_server((HOST, port))
        self._listener.setblocking(False)
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        """Port that clients connect to."""
        return int(self._listener.getsockname()[1])

    def heal(self) -> None:
        """End every fault."""
        self.bytes_per_s, self.delay_s, self.garble_pieces = None, 0.0, 0
        self.flows.set()

    def drop(self) -> int:
        """Close every connection; return how many there were."""
        for connection in self._connections:
            connection.cancel()
        return len(self._connections)

    async def run(self) -> None:
        """Carry connections until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            with self._listener:
                while True:
                    near, _ = await loop.sock_accept(self._listener)
                    connection = asyncio.create_task(self._carry(near))
                    self._connections.add(connection)
                    connection.add_done_callback(self._connections.discard)
        finally:
            self.drop()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _carry(self, near: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with near, socket.socket() as far, suppress(ConnectionError):
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE_BYTES)  # the server holds what waits
            for end in (near, far):
                end.setblocking(False)
            await self.flows.wait()
            await loop.sock_connect(far, (HOST, self.server_port))
            copies = [
                asyncio.create_task(self._copy(near, far, 0.5)),
                asyncio.create_task(self._copy(far, near, 1.0)),
            ]
            try:
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for copy in copies:
                    copy.cancel()
                await asyncio.gather(*copies, return_exceptions=True)

    async def _copy(self, source: socket.socket, target: socket.socket, share: float) -> None:
        loop = asyncio.get_running_loop()
        free_at = loop.time()
        with suppress(ConnectionError):
            while data := await loop.sock_recv(source, PIECE_BYTES):
                if self.bytes_per_s is not None:
                    free_at = max(free_at, loop.time()) + len(data) / (share * self.bytes_per_s)
                    await asyncio.sleep(free_at - loop.time())
                await asyncio.sleep(self.delay_s)
                await self.flows.wait()
                if self.garble_pieces:
                    self.garble_pieces -= 1
                    data = os.urandom(len(data))
                await loop.sock_sendall(target, data)


@asynccontextmanager
async def faulty_link(server_port: int, *, bytes_per_s: float | None = None) -> AsyncIterator[FaultyLink]:
    """Yield a link that is carried while inside."""
    link = FaultyLink(server_port, bytes_per_s=bytes_per_s)
    carrying = asyncio.create_task(link.run())
    try:
        yield link
    finally:
        carrying.cancel()
        with suppress(asyncio.CancelledError):
            await carrying
