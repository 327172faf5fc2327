"""Tells what exact arithmetic (model.numerics=exact) costs learner and embedded engine on a CPU.

`python -m benchmarks.exact` prints the figures as JSON. Both kinds of arithmetic take turns in one
process and one thread."""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from actors.engines.base import GenerationRequest, Sampling
from actors.engines.embedded.engine import EmbeddedEngine
from actors.settings.engines import EmbeddedEngineConfig
from benchmarks.embedded_engine import Workload as Prompts
from benchmarks.embedded_engine import chat_workload, demo_workload
from benchmarks.learner import OPTIMIZER, OVER_TOKENS
from benchmarks.learner_workloads import Workload as Batches
from benchmarks.learner_workloads import small
from learner.backends.contract.backend import Backend
from learner.backends.factory import BACKENDS, close_world, init_world
from learner.config.backend import BackendName

KINDS = {"fast": False, "exact": True}


def bench_exact(rounds: int = 5) -> dict[str, float]:
    """Return tokens per second of both kinds, medians of the rounds, and the ratios of exact to fast."""
    torch.set_num_threads(1)
    workload, backends = small(), tuple(BACKENDS)
    found: dict[str, float] = {}
    for backend in backends:
        found |= _learner(backend, workload, rounds)
    for name, prompts in (("chat", chat_workload()), ("demo", demo_workload())):
        found |= asyncio.run(_engine(name, prompts, rounds))
    return found


def _learner(backend: BackendName, workload: Batches, rounds: int) -> dict[str, float]:
    """Measure training steps, and passes that only compute log-probs."""
    init_world(backend=backend)
    try:
        torch.manual_seed(0)
        state = Qwen3ForCausalLM(workload.model).state_dict()
        sides: dict[str, Backend] = {
            kind: BACKENDS[backend]()(workload.model, state, OPTIMIZER, exact=exact)
            for kind, exact in KINDS.items()
        }
        batches = workload.batches()

        def step(side: Backend) -> None:
            side.train_step(batches, OVER_TOKENS, policy_version=0)

        def score(side: Backend) -> None:
            side.logprobs(batches)

        return {
            **_ratios(f"{backend}_step", sides, step, workload.tokens, rounds),
            **_ratios(f"{backend}_scoring", sides, score, workload.tokens, rounds),
        }
    finally:
        close_world()


async def _engine(name: str, prompts: Prompts, rounds: int) -> dict[str, float]:
    """Measure generation with log-probs."""
    sampling = Sampling(max_new_tokens=prompts.new_tokens)
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        Qwen3ForCausalLM(prompts.model).save_pretrained(directory)
        sides = {
            kind: EmbeddedEngine.from_directory(
                Path(directory), EmbeddedEngineConfig(), policy_version=0, exact=exact
            )
            for kind, exact in KINDS.items()
        }
    for engine in sides.values():
        await engine.start()
    seconds: dict[str, list[float]] = {kind: [] for kind in sides}
    for _ in range(rounds + 1):
        for kind, engine in sides.items():
            requests = [GenerationRequest(str(i), each, sampling) for i, each in enumerate(prompts.prompts)]
            began = time.perf_counter()
            await asyncio.gather(*map(engine.generate, requests))
            seconds[kind].append(time.perf_counter() - began)
    for engine in sides.values():
        await engine.close()
    return _figures(f"engine_{name}", seconds, len(prompts.prompts) * prompts.new_tokens)


def _ratios(
    name: str, sides: dict[str, Backend], run: Callable[[Backend], None], tokens: int, rounds: int
) -> dict[str, float]:
    seconds: dict[str, list[float]] = {kind: [] for kind in sides}
    for _ in range(rounds + 1):
        for kind, side in sides.items():
            began = time.perf_counter()
            run(side)
            seconds[kind].append(time.perf_counter() - began)
    return _figures(name, seconds, tokens)


def _figures(name: str, seconds: dict[str, list[float]], tokens: int) -> dict[str, float]:
    """Leave out the first round, which warms up."""
    fast, exact = (seconds[kind][1:] for kind in KINDS)
    return {
        f"{name}_exact_over_fast": statistics.median(f / e for f, e in zip(fast, exact, strict=True)),
        f"{name}_fast_tokens_per_s": tokens / statistics.median(fast),
        f"{name}_exact_tokens_per_s": tokens / statistics.median(exact),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(bench_exact(), indent=2) + "\n")
