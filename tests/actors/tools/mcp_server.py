"""An MCP server for tests: `python mcp_server.py stdio`, or `http PORT`."""

import os
import sys
import time

from mcp.server import MCPServer

server = MCPServer("test", log_level="ERROR")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("no luck")


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def environment() -> str:
    """Return the names of the environment's variables."""
    return " ".join(sorted(os.environ))


kept: list[str] = []


@server.tool()
def keep(text: str) -> str:
    """Keep a text, and return all that were kept."""
    kept.append(text)
    return " ".join(kept)


@server.tool()
async def hang() -> str:
    """Let nothing go on any more."""
    time.sleep(600)  # noqa: ASYNC251  # this is what it is for
    return ""


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run()
    else:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
