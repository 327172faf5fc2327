"""What an actor costs: rollouts through the bus, the recording and the engine, over the bare SGLang server.

Both do the same requests, all at once, in turns in one run; log-probs are compared with transformers'."""

import asyncio
import json
import tempfile
import time
from pathlib import Path

import aiohttp
import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from actors.config import SglangEngineConfig, SingleTurnConfig
from actors.engines.base import GenerationRequest, Sampling
from actors.engines.sglang import SglangEngine
from actors.engines.sglang_client import request_body
from actors.environments.base import ChatMessage
from actors.environments.single_turn import SingleTurn
from actors.filters import load_filter
from actors.policy import Policy
from actors.weights import PolicyFollower
from actors.worker import Worker
from bus.codec import encode
from bus.config import BusConfig
from bus.connection import Bus
from bus.errors import EngineError
from bus.messages import Lease, Prompt
from bus.publish import Publisher
from bus.server import NatsServer
from bus.topology import ensure

GROUPS, SAMPLES, NEW_TOKENS = 16, 8, 64
ROUNDS = 3
ROUND_TIMEOUT_S = 300.0
POLL_S = 0.005
SAMPLING = Sampling(max_new_tokens=NEW_TOKENS)


class Characters:
    """A tokenizer whose tokens are the code points below 256."""

    def apply_chat_template(
        self, conversation: list[ChatMessage], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        """Join what was said."""
        return "\n".join(str(message["content"]) for message in conversation)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Code points."""
        return list(text.encode("latin-1"))

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Characters."""
        return bytes(token_ids).decode("latin-1")


async def bench_actor(config: SglangEngineConfig | None = None) -> dict[str, float]:
    """Medians over rounds; starts a server of its own, which takes up to minutes.

    Raises `ConfigError` where SGLang is not installed."""
    model = _model()
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as directory:
        root = Path(directory)
        model.config.save_pretrained(root / "model")
        engine = SglangEngine(root / "model", config or SglangEngineConfig(), root / "engine.log")
        try:
            await engine.start()
            await engine.load_weights(model.state_dict(), 0)
            async with NatsServer(root / "nats") as server:
                bare, actor = await _measure(engine, server.url)
            difference = await _difference(engine, model)
        finally:
            await engine.close()
    return {
        "actor_over_bare_engine": float(np.median(np.array(actor) / np.array(bare))),
        "logprob_max_abs_diff": difference,
        "actor_tokens_per_s": float(np.median(actor)),
        "bare_engine_tokens_per_s": float(np.median(bare)),
    }


async def _measure(engine: SglangEngine, bus_url: str) -> tuple[list[float], list[float]]:
    """Tokens per second of each round, bare and through an actor; the first round only warms up."""
    bare, actor = [], []
    async with Bus.connect(BusConfig(url=bus_url), "bench", name="bench") as bus:
        await ensure(bus.js, bus.topology, shards=1)
        await bus.create_keys()
        for number in range(ROUNDS + 1):
            bare.append(await _bare(engine.url, number))
            actor.append(await _through_an_actor(bus, engine, number))
    return bare[1:], actor[1:]


def _content(number: int, group: int) -> str:
    """A prompt that no cache has seen before."""
    return f"round {number}, prompt {group}: continue"


async def _bare(url: str, number: int) -> float:
    """Every request at once, answers read and not looked at."""
    tokens = [list(_content(number, group).encode()) for group in range(GROUPS) for _ in range(SAMPLES)]
    bodies = [
        request_body(
            GenerationRequest("", prompt, SAMPLING), rid=f"bare-{number}-{n:05d}", salt=f"bare-{number}"
        )
        for n, prompt in enumerate(tokens)
    ]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def post(body: object) -> None:
            async with session.post(f"{url}/generate", json=body) as response:
                await response.read()
                response.raise_for_status()

        begun = time.perf_counter()
        async with asyncio.timeout(ROUND_TIMEOUT_S):
            await asyncio.gather(*map(post, bodies))
        return GROUPS * SAMPLES * NEW_TOKENS / (time.perf_counter() - begun)


async def _through_an_actor(bus: Bus, engine: SglangEngine, number: int) -> float:
    """From leases on the bus to the last acknowledged trajectory."""
    worker = Worker(
        bus,
        Policy(engine, Characters(), SAMPLING),
        SingleTurn.from_config(SingleTurnConfig(reward="exact")),
        follower=PolicyFollower(bus, engine),
        keep=load_filter("none"),
        shards=1,
        name="bench",
        share_after_s=None,
    )
    publisher, stop = Publisher(bus), asyncio.Event()
    for group in range(GROUPS):
        lease = Lease(
            lease_id=number * GROUPS + group,
            prompt=Prompt(content=_content(number, group), label="none"),
            samples=SAMPLES,
            policy_version=0,
        )
        subject = bus.subject("tasks", "rollout")
        await publisher.publish(subject, encode(lease), message_id=f"lease-{lease.lease_id}")
    begun = time.perf_counter()
    working = asyncio.create_task(worker.run(stop, groups_at_once=GROUPS))
    async with asyncio.timeout(ROUND_TIMEOUT_S):
        while worker.counts["groups"] < GROUPS:
            if worker.counts["rejected"]:
                raise EngineError("a rollout failed while it was measured: see what was logged before")
            await asyncio.sleep(POLL_S)
    seconds = time.perf_counter() - begun
    stop.set()
    await working
    return GROUPS * SAMPLES * NEW_TOKENS / seconds


async def _difference(engine: SglangEngine, model: PreTrainedModel) -> float:
    """The largest difference of a sampled token's log-prob to one forward over the whole sequence."""
    worst = 0.0
    for group in range(4):
        prompt = list(_content(0, group).encode())
        generation = await engine.generate(GenerationRequest(f"parity-{group}", prompt, SAMPLING))
        sequence = torch.tensor([[*prompt, *generation.token_ids.tolist()]])
        with torch.inference_mode():
            logprobs = model(input_ids=sequence, use_cache=False).logits[0].float().log_softmax(-1)
        tokens = torch.from_numpy(generation.token_ids).long()
        expected = logprobs[len(prompt) - 1 : -1].gather(1, tokens[:, None])[:, 0].numpy()
        worst = max(worst, float(np.abs(expected - generation.logprobs).max()))
    return worst


def _model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        dtype="float32",
    )
    model: PreTrainedModel = Qwen3ForCausalLM._from_config(config, dtype=torch.float32).eval()
    return model


if __name__ == "__main__":
    print(json.dumps(asyncio.run(bench_actor()), indent=2))  # noqa: T201 - a report
