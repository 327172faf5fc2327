"""Tells what a request through the gateway costs beside one to the policy itself, both on a scripted engine.

`python -m launch.benchmarks.gateway` prints milliseconds as JSON; with an argument it is the client, a process
of its own. Each conversation has so many turns, and each turn repeats all those before it.
"""

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

import aiohttp
import numpy as np
import uvloop

from actors.engines.base import GenerationRequest, Sampling
from actors.engines.scripted import ScriptedEngine
from actors.environments.base import ChatMessage
from actors.gateway.config import GatewayConfig
from actors.gateway.server import Gateway
from actors.policy.policy import Policy
from bus.child_process import module_command
from bus.errors import EngineError
from learner.scratch_model import character_tokenizer

ONE_AFTER_ANOTHER = 20
"""Sessions of which one at a time asks."""
AT_ONCE = 256
"""Sessions that ask at the same time."""
TURNS = 20
ANSWER = "the answer has thirty two tokens"
QUESTION = "and what is the next number of the row, if you go on?"
TIMEOUT_S = 300.0
LAG_PERIOD_S = 0.005
Report = dict[str, dict[str, float]]


def bench_gateway() -> Report:
    """Return p50 and p99 of a request in ms: to the engine, the policy, and the gateway by one or by many."""
    return uvloop.run(_bench())


async def _bench() -> Report:
    tokenizer = character_tokenizer()
    answer = [*tokenizer.encode(ANSWER, add_special_tokens=False), tokenizer.eos_token_id]
    engine = ScriptedEngine(lambda _: answer)
    policy = Policy(engine, tokenizer, Sampling(max_new_tokens=64))
    prompt = tokenizer.encode(QUESTION, add_special_tokens=False)

    async def generate(number: int) -> None:
        await engine.generate(GenerationRequest(f"r{number}", prompt, Sampling(max_new_tokens=64)))

    report = {"engine_ms": _spread([await _timed(lambda n=n: generate(n)) for n in range(400)])}
    spent = [time for n in range(ONE_AFTER_ANOTHER) for time in await _conversation(policy.fresh(f"p{n}"))]
    report["policy_ms"] = _spread(spent)
    one, _ = await _through_gateway(policy, ONE_AFTER_ANOTHER, at_once=1)
    report["gateway_ms"] = _spread(one)
    started = time.monotonic()
    many, lag = await _through_gateway(policy, AT_ONCE, at_once=AT_ONCE)
    report["gateway_of_many_ms"] = _spread(many)
    report["event_loop_lag_of_many_ms"] = _spread(lag)
    report["of_many"] = {
        "sessions": AT_ONCE,
        "requests": len(many),
        "requests_per_s": round(len(many) / (time.monotonic() - started), 1),
    }
    return report


async def _conversation(policy: Policy) -> list[float]:
    messages: list[ChatMessage] = []
    spent = []
    for _ in range(TURNS):
        messages.append({"role": "user", "content": QUESTION})
        spent.append(await _timed(lambda: policy.chat(messages)))
        messages.append({"role": "assistant", "content": ANSWER})
    return spent


async def _through_gateway(policy: Policy, sessions: int, *, at_once: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each request, and by how much the event loop was late meanwhile."""
    gateway = Gateway(GatewayConfig())
    await gateway.start()
    lag: list[float] = []
    try:
        async with AsyncExitStack() as opened:
            urls = [
                gateway.url_of(await opened.enter_async_context(gateway.session(policy.fresh(f"s{n}"), "")))
                for n in range(sessions)
            ]
            watching = asyncio.create_task(_watch_lag(lag))
            spent = await _client(urls, at_once)
            watching.cancel()
            return spent, lag
    finally:
        await gateway.close()


async def _client(urls: Sequence[str], at_once: int) -> list[float]:
    process = await asyncio.create_subprocess_exec(
        *module_command("launch.benchmarks.gateway", str(at_once)), stdin=PIPE, stdout=PIPE
    )
    async with asyncio.timeout(TIMEOUT_S):
        said, _ = await process.communicate(json.dumps(urls).encode())
    if process.returncode:
        raise EngineError(f"the client of the bench ended with {process.returncode}: see above")
    found: list[float] = json.loads(said)
    return found


async def _ask(urls: Sequence[str], at_once: int) -> list[float]:
    """Hold the conversations, so many at a time; return the seconds of each request."""
    spent: list[float] = []
    slots = asyncio.Semaphore(at_once)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def post(url: str, messages: list[ChatMessage]) -> None:
            body = {"model": "policy", "messages": messages}
            async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
                answer.raise_for_status()
                messages.append((await answer.json())["choices"][0]["message"])

        async def converse(url: str) -> None:
            messages: list[ChatMessage] = []
            async with slots:
                for _ in range(TURNS):
                    messages.append({"role": "user", "content": QUESTION})
                    spent.append(await _timed(lambda: post(url, messages)))

        await asyncio.gather(*map(converse, urls))
    return spent


async def _watch_lag(lag: list[float]) -> None:
    while True:
        due = time.perf_counter() + LAG_PERIOD_S
        await asyncio.sleep(LAG_PERIOD_S)
        lag.append(time.perf_counter() - due)


async def _timed(call: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await call()
    return time.perf_counter() - began


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(np.array(seconds) * 1e3, [50, 99])
    return {"p50": round(float(p50), 3), "p99": round(float(p99), 3)}


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(json.dumps(bench_gateway(), indent=2))  # noqa: T201 - the user's terminal
    else:
        print(json.dumps(uvloop.run(_ask(json.load(sys.stdin), int(sys.argv[1])))))  # noqa: T201 - a pipe
