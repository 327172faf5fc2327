"""Tells what a request through the gateway costs beside one to the policy itself, both on a scripted engine.

`launch bench gateway` prints the figures. The client is a process of its own; each conversation has several
turns, and each turn repeats all those before it. `cpu` is the time that this process spent on a request.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack

import numpy as np
import uvloop

from actors.engines.base import GenerationRequest, Sampling
from actors.episodes.task import ChatMessage
from actors.gateway.server import Gateway
from actors.policy.policy import Policy
from actors.settings.gateway import GatewayConfig
from benchmarks.gateway_client import QUESTION, client
from benchmarks.scripted_engine import ScriptedEngine
from bus.errors import EngineError
from bus.waiting import cancelled
from learner.initial.scratch_model import character_tokenizer

ALONE = 20
"""Sessions of which one at a time asks."""
AT_ONCE = 256
"""Sessions that ask at the same time."""
TURNS = 20
ANSWER = "the answer has thirty two tokens"
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

    report: Report = {
        "engine_ms": _spread([await _timed(engine.generate(_request(n, prompt))) for n in range(400)])
    }
    cpu = time.process_time()
    spent = [took for n in range(ALONE) for took in await _conversation(policy.fresh(f"p{n}"))]
    report["policy_ms"] = {**_spread(spent), "cpu": _mean_ms(time.process_time() - cpu, len(spent))}
    for name, sessions, at_once in (("gateway", ALONE, 1), ("gateway_of_many", AT_ONCE, AT_ONCE)):
        report.update(await _through_gateway(name, policy, sessions, at_once))
    return report


def _request(number: int, prompt: list[int]) -> GenerationRequest:
    return GenerationRequest(f"r{number}", prompt, Sampling(max_new_tokens=64))


async def _conversation(policy: Policy) -> list[float]:
    messages: list[ChatMessage] = []
    spent = []
    for _ in range(TURNS):
        messages.append({"role": "user", "content": QUESTION})
        spent.append(await _timed(policy.chat(messages)))
        messages.append({"role": "assistant", "content": ANSWER})
    return spent


async def _through_gateway(name: str, policy: Policy, sessions: int, at_once: int) -> Report:
    """Return what requests took, and by how much the event loop was late meanwhile."""
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
            began, cpu = time.monotonic(), time.process_time()
            spent = await _client(urls, at_once)
            cpu, took = time.process_time() - cpu, time.monotonic() - began
            await cancelled(watching)
    finally:
        await gateway.close()
    load = {"sessions": at_once, "requests": len(spent), "requests_per_s": round(len(spent) / took, 1)}
    return {
        f"{name}_ms": {**_spread(spent), "cpu": _mean_ms(cpu, len(spent))},
        f"{name}_event_loop_lag_ms": _spread(lag),
        f"{name}_load": load,
    }


async def _client(urls: Sequence[str], at_once: int) -> list[float]:
    process = await client(at_once, TURNS)
    async with asyncio.timeout(TIMEOUT_S):
        said, _ = await process.communicate("".join(f"{url}\n" for url in urls).encode())
    if process.returncode:
        raise EngineError(f"the client of the bench ended with {process.returncode}: see above")
    return [took for line in said.splitlines() for took in json.loads(line)[1]]


async def _watch_lag(lag: list[float]) -> None:
    while True:
        due = time.perf_counter() + LAG_PERIOD_S
        await asyncio.sleep(LAG_PERIOD_S)
        lag.append(time.perf_counter() - due)


async def _timed(call: Awaitable[object]) -> float:
    began = time.perf_counter()
    await call
    return time.perf_counter() - began


def _mean_ms(seconds: float, count: int) -> float:
    return round(seconds * 1e3 / count, 3)


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(np.array(seconds) * 1e3, [50, 99])
    return {"p50": round(float(p50), 3), "p99": round(float(p99), 3)}


if __name__ == "__main__":
    print(json.dumps(bench_gateway(), indent=2))  # noqa: T201 - the user's terminal
