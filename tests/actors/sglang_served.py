"""What tests of real SGLang servers share: two policies of a tiny model, and looks at what a server does."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.engines.sglang.engine import SglangEngine
from actors.engines.sglang.server.server import group_members
from actors.settings.engines import SglangEngineConfig
from tests.actors.tiny import request

PROMPT = [3, 4, 5, 6, 7]
LONG = 1500
CONFIG = {"type": "sglang", "start_timeout_s": 240.0, "health_every_s": 2.0}


def policy(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )
    return Qwen3ForCausalLM._from_config(config, dtype=torch.float32).eval()


FIRST, SECOND = policy(0), policy(1)


def group_of(engine) -> list[int]:
    return group_members(engine._server.process.pid)


@asynccontextmanager
async def own_server(model: Path, log_directory: Path) -> AsyncIterator[SglangEngine]:
    """An engine with a server for the model in a directory, all of whose processes end with it."""
    engine = SglangEngine(model, SglangEngineConfig(**CONFIG), log_directory / "engine.log")
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()
    assert group_of(engine) == []


async def until(condition, what: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        await asyncio.sleep(0.05)


async def requests_at_the_worker(engine) -> int:
    states = (await engine._client._call("GET", "/v1/loads"))["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in states)


async def in_flight(engine, *generations) -> None:
    """Return when the worker decodes so many and the engine has a token of each, before which an update may
    end them; they are long enough to go on for a while."""

    async def running():
        assert not any(generation.done() for generation in generations)
        begun = not any(flight.may_wait for flight in engine.in_progress)
        return begun and await requests_at_the_worker(engine) == len(generations)

    await until(running, f"{len(generations)} requests that the worker has begun with")


def noted(call, names, name):
    """The same, which says each time that it is called."""

    def noting(*args, **kwargs):
        names.append(name)
        return call(*args, **kwargs)

    return noting


def started(engine, name, prompt=PROMPT, new=LONG, **sampling):
    return asyncio.create_task(engine.generate(request(name, prompt, new=new, **sampling)))


MOST_NATS = 2e-5
"""Float32 on both sides; a sum of a few hundred terms in another order."""


EACH_ON_A_CORE = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
