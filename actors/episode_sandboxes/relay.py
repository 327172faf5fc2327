"""Brings connections at a port of a container's loopback to a socket of its host:

    python3 -c CODE PORT SOCKET

The Python of the image runs it, which may be old and has the standard library alone. It ends once it listens,
and its child goes on."""

import asyncio
import os
import socket
import sys

READ_BYTES = 1 << 16


def main() -> None:
    """Relay until the container ends."""
    listening = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=1024)
    if os.fork():
        os._exit(0)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    asyncio.run(_serve(listening))


async def _serve(listening: socket.socket) -> None:
    server = await asyncio.start_server(_relay, sock=listening)
    await server.serve_forever()


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        far_reader, far_writer = await asyncio.open_unix_connection(sys.argv[2])
    except OSError:  # the gateway is gone, as its episode is
        writer.close()
        return
    await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until one side has closed, and close the other."""
    try:
        while data := await reader.read(READ_BYTES):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


if __name__ == "__main__":
    main()
