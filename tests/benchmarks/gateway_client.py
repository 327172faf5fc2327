"""The client of benchmarks, a process of its own: holds conversations through a gateway.

`python -m benchmarks.gateway_client AT_ONCE TURNS QUESTION` reads base URLs, one a line, holds a conversation
at each, so many at a time, and writes a line when one has ended: its URL and the seconds of each request.
"""

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE, Process

import aiohttp
import uvloop

from bus.process.child_process import module_command

QUESTION = "and what is the next number of the row, if you go on?"


async def client(at_once: int, turns: int, question: str = QUESTION) -> Process:
    """Start a client; what is closed at its input ends it."""
    command = module_command("benchmarks.gateway_client", str(at_once), str(turns), question)
    return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)


async def _converse(http: aiohttp.ClientSession, url: str, turns: int, question: str) -> list[float]:
    messages: list[object] = []
    spent: list[float] = []
    for _ in range(turns):
        messages.append({"role": "user", "content": question})
        began = time.perf_counter()
        body = {"model": "policy", "messages": messages}
        async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            said = await answer.json()
        spent.append(time.perf_counter() - began)
        messages.append(said["choices"][0]["message"])
    return spent


async def _converse_all(at_once: int, turns: int, question: str) -> None:
    slots, lines = asyncio.Semaphore(at_once), asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    unlimited, patient = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(connector=unlimited, timeout=patient) as http,
        asyncio.TaskGroup() as tasks,
    ):

        async def converse(url: str) -> None:
            async with slots:
                spent = await _converse(http, url, turns, question)
            print(json.dumps([url, spent]), flush=True)  # noqa: T201 - a pipe

        async for line in lines:
            tasks.create_task(converse(line.decode().strip()))


if __name__ == "__main__":
    uvloop.run(_converse_all(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
