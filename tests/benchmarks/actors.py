"""Tells what an actor costs: rollouts through the bus, the recording and the engine, over the bare SGLang
server.

Both do the same requests, all at once, in turns in one run; log-probs are compared with transformers'.

The figures of docs/performance.md on an H200:

    launch bench actors --server-only --model qwen3-0.6b --concurrency 256 --new-tokens 512 --rounds 3 \\
        --actors.engine.server.mem-fraction-static 0.8 --json
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import torch
from transformers import PreTrainedModel

from actors.engines.base import GenerationRequest, Sampling
from actors.engines.sglang.client.request_bodies import request_body
from actors.engines.sglang.engine import SglangEngine
from actors.engines.sglang.server.settings import interpreter
from actors.environments.single_turn import SingleTurn
from actors.episodes.task import ChatMessage
from actors.policy.messages import Tool
from actors.policy.policy import Policy
from actors.rewards.group_filters import load_filter
from actors.rollouts.worker import Worker
from actors.settings.actors import SingleTurnConfig
from actors.settings.engines import SglangEngineConfig
from actors.weights.follow import PolicyFollower
from benchmarks.run_bus import make_run
from bus.codec import encode
from bus.config import BusConfig
from bus.connection import Bus
from bus.errors import ConfigError, EngineError
from bus.messages import Lease, Prompt
from bus.process.process_tuning import few_collections, quick_turns
from bus.server.nats_server import NatsServer
from bus.streams.publish import Publisher
from storage.chats.stop_tokens import AddedToken

SAMPLES = 8
"""Rollouts of each prompt."""
PARITY_PROMPTS = 8
ROUND_TIMEOUT_S = 300.0
POLL_S = 0.005


@dataclass(frozen=True)
class ActorLoad:
    """Says how much is asked for."""

    concurrency: int = 128
    """Requests that run at once, a multiple of `SAMPLES`."""
    new_tokens: int = 64
    """Number of tokens of each answer."""
    rounds: int = 3
    """Number of measured rounds of each side."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for what cannot be asked for."""
        if self.concurrency < SAMPLES or self.concurrency % SAMPLES:
            raise ConfigError(f"{self.concurrency} requests at once: give a multiple of {SAMPLES}")
        if self.new_tokens < 1 or self.rounds < 1:
            raise ConfigError(f"{self.new_tokens} tokens in {self.rounds} rounds: give at least 1 of each")

    @property
    def groups(self) -> int:
        """Return the number of prompts in flight."""
        return self.concurrency // SAMPLES

    @property
    def tokens(self) -> int:
        """Return the number of tokens that a round generates."""
        return self.concurrency * self.new_tokens

    @property
    def sampling(self) -> Sampling:
        """Sampling settings of every request."""
        return Sampling(max_new_tokens=self.new_tokens)


class Characters:
    """A tokenizer whose tokens are the code points below 256."""

    chat_template = ""
    added_tokens_decoder: Mapping[int, AddedToken] = {}

    def apply_chat_template(
        self, conversation: list[ChatMessage], *, tools: list[Tool] | None,
        tokenize: bool, add_generation_prompt: bool,
    ) -> str:  # fmt: skip
        """Join what was said."""
        return "\n".join(str(message["content"]) for message in conversation)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Code points."""
        return list(text.encode("latin-1"))

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Characters; tokens above 255 share them."""
        return "".join(chr(token % 256) for token in token_ids)


async def bench_actor(
    config: SglangEngineConfig, build: Callable[[], PreTrainedModel], load: ActorLoad
) -> dict[str, float]:
    """Medians over rounds, and log-probs beside those of the model that `build` gives.

    Starts a server of its own, which takes up to minutes, unless the settings name one. Raises `ConfigError`
    where SGLang is not installed."""
    if config.url is None:
        interpreter(config)  # before the model takes its time
    model = build()
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as directory:
        root = Path(directory)
        model.config.save_pretrained(root / "model")
        engine = SglangEngine(root / "model", config, root / "engine.log")
        try:
            await engine.start()
            await engine.load_weights(_state(model), 0)
            async with NatsServer(root / "nats") as server:
                # as an actor's process does
                with few_collections(), quick_turns():
                    measured = await _measure(engine, server.url, load)
                bare, actor = zip(*measured, strict=True)
            differences = await _differences(engine, model, load)
        finally:
            await engine.close()
    actor_rate, actor_cpu_s = np.array(actor).T
    bare_rate, bare_cpu_s = np.array(bare).T
    return {
        "actor_over_bare_engine": float(np.median(actor_rate / bare_rate)),
        **differences,
        "actor_tokens_per_s": float(np.median(actor_rate)),
        "bare_engine_tokens_per_s": float(np.median(bare_rate)),
        "actor_cpu_ms_per_request": 1000 * float(np.median(actor_cpu_s)),
        "bare_client_cpu_ms_per_request": 1000 * float(np.median(bare_cpu_s)),
        "concurrency": load.concurrency,
        "new_tokens": load.new_tokens,
    }


def _state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return weights as a learner publishes them: on the host, tied ones once."""
    return {name: tensor.detach().cpu() for name, tensor in model.named_parameters()}


Side = tuple[float, float]
"""Tokens per second, and this process's CPU seconds per request."""


async def _measure(engine: SglangEngine, bus_url: str, load: ActorLoad) -> list[tuple[Side, Side]]:
    """Return those of each round, bare and through an actor; the first round only warms up."""
    found = []
    async with Bus.connect(BusConfig(url=bus_url), "bench", name="bench") as bus:
        await make_run(bus)
        for number in range(load.rounds + 1):
            bare = await _bare(engine.url, number, load)
            found.append((bare, await _through_an_actor(bus, engine, number, load)))
    return found[1:]


def _content(number: int, group: int) -> str:
    """Return a prompt that no cache has seen before."""
    return f"round {number}, prompt {group}: continue"


async def _bare(url: str, number: int, load: ActorLoad) -> Side:
    """Send every request at once; the answers are read and not looked at."""
    tokens = [list(_content(number, group).encode()) for group in range(load.groups) for _ in range(SAMPLES)]
    bodies = [
        request_body(
            GenerationRequest("", prompt, load.sampling), rid=f"bare-{number}-{n:05d}", salt=f"bare-{number}"
        )
        for n, prompt in enumerate(tokens)
    ]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def post(body: object) -> None:
            async with session.post(f"{url}/generate", json=body) as response:
                await response.read()
                response.raise_for_status()

        begun, cpu_s = time.perf_counter(), time.process_time()
        async with asyncio.timeout(ROUND_TIMEOUT_S):
            await asyncio.gather(*map(post, bodies))
        return load.tokens / (time.perf_counter() - begun), (time.process_time() - cpu_s) / len(bodies)


async def _through_an_actor(bus: Bus, engine: SglangEngine, number: int, load: ActorLoad) -> Side:
    """Measure from leases on the bus to the last acknowledged trajectory."""
    worker = Worker(
        bus,
        Policy(engine, Characters(), load.sampling),
        SingleTurn.from_config(SingleTurnConfig(reward="exact")),
        follower=PolicyFollower(bus, engine),
        keep=load_filter("none"),
        shards=1,
        name="bench",
    )
    publisher, stop = Publisher(bus), asyncio.Event()
    for group in range(load.groups):
        lease = Lease(
            lease_id=number * load.groups + group,
            prompt=Prompt(content=_content(number, group), label="none"),
            samples=SAMPLES,
            policy_version=0,
        )
        subject = bus.subject("tasks", "rollout")
        await publisher.publish(subject, encode(lease), message_id=f"lease-{lease.lease_id}")
    begun, cpu_s = time.perf_counter(), time.process_time()
    working = asyncio.create_task(worker.run(stop, groups_at_once=load.groups))
    async with asyncio.timeout(ROUND_TIMEOUT_S):
        while worker.counts["groups"] < load.groups:
            if worker.counts["rejected"]:
                raise EngineError("a rollout failed while it was measured: see what was logged before")
            await asyncio.sleep(POLL_S)
    seconds, cpu_s = time.perf_counter() - begun, time.process_time() - cpu_s
    stop.set()
    await working
    return load.tokens / seconds, cpu_s / (load.groups * SAMPLES)


async def _differences(engine: SglangEngine, model: PreTrainedModel, load: ActorLoad) -> dict[str, float]:
    """Return how far sampled tokens' log-probs are from one forward over the whole sequence, in nats.

    `float32_head` ones are of an output layer in float32, as the learner computes them."""
    found: dict[str, list[np.ndarray]] = {"": [], "float32_head_": []}
    for group in range(PARITY_PROMPTS):
        prompt = list(_content(0, group).encode())
        request = GenerationRequest(f"parity-{group}", prompt, load.sampling)
        generation = await engine.generate(request)
        expected = _logprobs(model, prompt, generation.token_ids)
        for name, values in zip(found, expected, strict=True):
            found[name].append(np.abs(values - generation.logprobs))
    return {
        f"{name}logprob_{what}_abs_diff": float(measure(np.concatenate(differences)))
        for name, differences in found.items()
        for what, measure in (("max", np.max), ("mean", np.mean))
    }


@torch.inference_mode()
def _logprobs(
    model: PreTrainedModel, prompt: list[int], sampled: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens' log-probs, float32 [N], by the model's own output layer and by one in float32."""
    sequence = torch.tensor([[*prompt, *sampled.tolist()]], device=model.device)
    hidden = model.model(input_ids=sequence, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
    tokens = torch.from_numpy(sampled).long().to(model.device)[:, None]
    head = model.lm_head
    own, precise = head(hidden).float(), hidden.float() @ head.weight.float().t()
    first, second = (
        logits.log_softmax(-1).gather(1, tokens)[:, 0].cpu().numpy() for logits in (own, precise)
    )
    return first, second
