"""The client of `benchmarks.gateway`, a process of its own: holds conversations through a gateway."""

import asyncio
import json
import sys
import time
from collections.abc import Sequence

import aiohttp
import uvloop

TURNS = 20
QUESTION = "and what is the next number of the row, if you go on?"


async def converse_all(urls: Sequence[str], at_once: int) -> list[float]:
    """Hold a conversation in each session, so many at a time; return the seconds of each request."""
    spent: list[float] = []
    slots = asyncio.Semaphore(at_once)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def converse(url: str) -> None:
            messages: list[object] = []
            async with slots:
                for _ in range(TURNS):
                    messages.append({"role": "user", "content": QUESTION})
                    body = {"model": "policy", "messages": messages}
                    began = time.perf_counter()
                    async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
                        answer.raise_for_status()
                        said = await answer.json()
                    spent.append(time.perf_counter() - began)
                    messages.append(said["choices"][0]["message"])

        await asyncio.gather(*map(converse, urls))
    return spent


if __name__ == "__main__":
    print(json.dumps(uvloop.run(converse_all(json.load(sys.stdin), int(sys.argv[1])))))  # noqa: T201 - a pipe
