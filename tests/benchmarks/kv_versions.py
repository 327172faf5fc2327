"""Tells whether answers come from the weights that they name, their keys and values too, across many updates.

A SGLang server answers more requests at once than it runs, on prompts that many of them share, while its
weights change again and again as they do at a high learning rate. Transformers then computes every log-prob
again with the very weights that the token names, and keys and values of these. Where those that the server
used were of older weights, the log-probs differ by more than the arithmetic of server and transformers does,
which answers without any update show."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from actors.engines.announced_version import Published
from actors.engines.base import Generation, GenerationRequest, Sampling
from actors.engines.continued_generation import joined, next_piece
from actors.engines.served_adapters import ServedAdapters
from actors.engines.sglang.engine import SglangEngine
from actors.settings.engines import SglangEngineConfig
from benchmarks.random_models import random_model, shape
from bus.codec import Json
from bus.config import BusConfig
from bus.connection import Bus
from bus.errors import BusError, ConfigError
from bus.messages import BlobRef, PolicyManifest
from bus.server.nats_server import NatsServer
from learner.distributed.process_group import device
from learner.host_memory.copies import host_tensors
from learner.publication.broadcast import Broadcaster
from storage.model_files.adapter_names import adapter_names
from storage.weights.tensors import Weights

MODES: Mapping[str, Mapping[str, object]] = {
    "no_updates": {},
    "in_place": {"pause": "in_place"},
    "retract": {"pause": "retract"},
    "drain": {"pause": "drain"},
    "group": {"update": "group"},
    "adapters": {"adapter": "loaded"},
    "hierarchical_cache": {"server": {"enable_hierarchical_cache": True}},
    "pair": {
        "disaggregation": {"enabled": True, "transfer": "mooncake_tcp", "decode": {"hicache_ratio": 2.0}}
    },
}
"""Settings of the engine by the name of what is measured; the first has no updates."""
ATTACHED = {"pause", "update"}
"""Settings of the engine alone, by which one server serves one mode after another."""
NO_BLOB = BlobRef(subject="none", chunks=1, size_bytes=1, digest="0" * 32)
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")
RANK = 8
SENT_S = 120.0
"""Longest wait of the learner's group for the server."""
SERVED = ServedAdapters(rank=RANK, scale=2.0, modules=ADAPTED, versions=3)
State = dict[str, Tensor]
Give = Callable[[State, int], Awaitable[object]]
"""Has a server take weights of a version."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Says what is asked, and how weights change meanwhile."""

    model: str = "tiny"
    answers: int = 1000
    updates: int = 20
    lr: float = 1e-3
    """What an update adds to each weight or takes from it: AdamW's steps are of that size at first."""
    at_once: int = 32
    """Requests under way, of which the server runs a quarter."""
    prompts: int = 8
    """Different prompts, all of which begin alike."""
    prompt_tokens: int = 96
    new_tokens: int = 48
    """Most tokens of an answer; the mean is half of it."""
    seed: int = 0

    def requests(self, vocabulary: int) -> Iterator[GenerationRequest]:
        """Yield the requests."""
        draw = np.random.default_rng(self.seed)
        prompts = draw.integers(0, vocabulary, (self.prompts, self.prompt_tokens))
        prompts[:, : self.prompt_tokens // 2] = prompts[0, : self.prompt_tokens // 2]
        for number in range(self.answers):
            sampling = Sampling(max_new_tokens=int(draw.integers(2, self.new_tokens)))
            yield GenerationRequest(f"answer-{number}", prompts[number % self.prompts].tolist(), sampling)


class Answer(NamedTuple):
    """What a server made of a prompt."""

    prompt: Sequence[int]
    generation: Generation


class Policy:
    """A random model from its first version on, each of which is the same whenever it is made."""

    def __init__(self, load: Load, *, adapted: bool) -> None:
        self.version = 0
        self._load = load
        self._model = random_model(load.model, seed=load.seed)
        self._base = {name: tensor.detach().clone() for name, tensor in self._model.named_parameters()}
        self._trained: State = {} if adapted else dict(self._base)
        for name, tensor in self._base.items() if adapted else ():
            if name.split(".")[-2] in ADAPTED:
                a, b = adapter_names(name)
                self._trained[a] = tensor.new_empty(RANK, tensor.shape[1]).normal_(std=0.05)
                self._trained[b] = tensor.new_empty(tensor.shape[0], RANK).normal_(std=0.05)

    def update(self) -> None:
        """Become the next version."""
        self.version += 1
        draw = torch.Generator(device()).manual_seed(self._load.seed + self.version)
        for tensor in self._trained.values():
            tensor += self._load.lr * torch.empty_like(tensor).normal_(generator=draw).sign()

    @property
    def published(self) -> State:
        """Return copies of the tensors that a server takes."""
        return {name: tensor.to("cpu", copy=True) for name, tensor in (self._base | self._trained).items()}

    @property
    def model(self) -> Qwen3ForCausalLM:
        """Return the model with the weights of this version."""
        state = dict(self._model.named_parameters())
        with torch.no_grad():
            for name, tensor in self._base.items():
                a, b = adapter_names(name)
                added = SERVED.scale * self._trained[b] @ self._trained[a] if a in self._trained else 0.0
                state[name].copy_(self._trained.get(name, tensor) + added)
        return self._model


def refuse_unknown(modes: Sequence[str]) -> None:
    """Raise `ConfigError` for a mode that there is none of."""
    if other := sorted(set(modes) - set(MODES)):
        raise ConfigError(f"--modes {','.join(other)}: there are {', '.join(MODES)}")


def bench_kv_versions(load: Load, engine: SglangEngineConfig, modes: Sequence[str]) -> dict[str, Json]:
    """Return the figures of `compared` by mode. `engine` are the settings that servers have in all modes."""
    answers = asyncio.run(_sampled(load, engine, modes))
    figures: dict[str, Json] = {
        mode: dict(compared(load, answers[mode], adapted=mode == "adapters")) for mode in modes
    }
    return {"model": load.model, "lr": load.lr, "updates": load.updates, "figures": figures}


async def _sampled(load: Load, engine: SglangEngineConfig, modes: Sequence[str]) -> dict[str, list[Answer]]:
    """Return the answers by mode. Modes that need no server of their own have one, one after another."""
    answers: dict[str, list[Answer]] = {}
    attaching = [mode for mode in modes if MODES[mode].keys() <= ATTACHED]
    if attaching:
        async with _started(load, _settings(load, engine, {})) as server:
            for mode in attaching:
                settings = SglangEngineConfig(url=server.url, **MODES[mode])
                async with _started(load, settings) as attached:
                    updates = 0 if mode == "no_updates" else load.updates
                    answers[mode] = await _answered(replace(load, updates=updates), attached, mode)
    for mode in modes:
        if mode not in attaching:
            settings = _settings(load, engine, MODES[mode])
            async with _started(load, settings, served=SERVED if mode == "adapters" else None) as started:
                answers[mode] = await _answered(load, started, mode)
    return answers


def _settings(load: Load, engine: SglangEngineConfig, changed: Mapping[str, Any]) -> SglangEngineConfig:
    """Return the settings of a server that runs a quarter of the requests under way."""
    server = {
        "max_running_requests": max(1, load.at_once // 4),
        **engine.settings,
        **changed.get("server", {}),
    }
    return engine.model_validate(engine.model_dump(exclude_unset=True) | dict(changed) | {"server": server})


@asynccontextmanager
async def _started(
    load: Load, settings: SglangEngineConfig, served: ServedAdapters | None = None
) -> AsyncIterator[SglangEngine]:
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as directory:
        shape(load.model).save_pretrained(Path(directory, "model"))
        engine = SglangEngine(
            Path(directory, "model"), settings, Path(directory, "engine.log"), served=served
        )
        try:
            await engine.start()
            yield engine
        finally:
            await engine.close()


async def _answered(load: Load, engine: SglangEngine, mode: str) -> list[Answer]:
    """Return what a server answers while it gets all versions, each after as many answers."""
    answers, progress = list[Answer](), asyncio.Event()
    policy = Policy(load, adapted=mode == "adapters")
    requests = load.requests(shape(load.model).vocab_size)

    async def ask() -> None:
        for request in requests:
            answers.append(Answer(request.token_ids, await _whole(engine, request)))
            progress.set()

    giving = _in_group(engine) if mode == "group" else nullcontext(engine.load_weights)
    async with giving as give:
        await give(policy.published, 0)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(load.at_once):
                tasks.create_task(ask())
            while policy.version < load.updates:
                while len(answers) < (policy.version + 1) * load.answers // (load.updates + 1):
                    progress.clear()
                    await progress.wait()
                policy.update()
                await give(policy.published, policy.version)
    return answers


@asynccontextmanager
async def _in_group(engine: SglangEngine) -> AsyncIterator[Give]:
    """Give an engine weights as the learner of its cluster does."""
    announced: list[Weights] = []
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as directory:
        async with (
            NatsServer(Path(directory)) as server,
            Bus.connect(BusConfig(url=server.url), "bench", name="bench") as bus,
        ):
            sending = Broadcaster(bus, lambda: announced[-1], incarnation="bench", timeout_s=SENT_S)
            await sending.start()

            async def not_fetched(manifest: PolicyManifest) -> State:
                raise BusError(f"version {manifest.policy_version} did not come by the group")

            async def give(state: State, version: int) -> None:
                announced[:] = [Weights.of(version, host_tensors(state))]
                manifest = PolicyManifest(
                    policy_version=version, incarnation="bench", snapshot=NO_BLOB, model=NO_BLOB, stage="rl"
                )
                await engine.load_published(Published(bus, manifest, not_fetched))

            try:
                yield give
            finally:
                await sending.close()


async def _whole(engine: SglangEngine, request: GenerationRequest) -> Generation:
    """Return all of a generation: what an update ends goes on as another request."""
    pieces: list[Generation] = []
    for attempt in count():
        begun = joined(pieces)
        left = request.sampling.max_new_tokens - len(begun.token_ids)
        part = replace(next_piece(request, begun, left), request_id=f"{request.request_id}-{attempt}")
        pieces.append(await engine.generate(part))
        if pieces[-1].finish_reason != "abort" or left == len(pieces[-1].token_ids):
            break
    return joined(pieces)


def compared(load: Load, answers: Sequence[Answer], *, adapted: bool) -> dict[str, float]:
    """Compare the log-probs of answers with those of the weights that each token names.

    Returns the number of answers, of the versions that drew them and of those answers of which all tokens are
    fresh; and of tokens that are fresh, and of those over keys and values of older weights, the number, and
    the mean and largest absolute difference in nats."""
    policy = Policy(load, adapted=adapted)
    apart = [np.full(len(answer.generation.token_ids), np.nan) for answer in answers]
    for version in range(load.updates + 1):
        model = policy.model
        for answer, found in zip(answers, apart, strict=True):
            of_version = answer.generation.policy_versions == version
            if of_version.any():
                logprobs = _logprobs(model, answer)
                found[of_version] = np.abs(logprobs - answer.generation.logprobs)[of_version]
        policy.update()
    fresh = np.concatenate([_is_fresh(answer.generation) for answer in answers])
    nats = np.concatenate(apart)
    whole = sum(bool(_is_fresh(answer.generation).all()) for answer in answers)
    seen = np.unique(np.concatenate([answer.generation.policy_versions for answer in answers]))
    figures = {"answers": float(len(answers)), "versions": float(len(seen)), "fresh_answers": float(whole)}
    for name, among in (("fresh", fresh), ("older_kv", ~fresh)):
        of = nats[among]
        figures |= {f"{name}_tokens": float(len(of))}
        if len(of):
            figures |= {f"{name}_mean_nats": float(of.mean()), f"{name}_largest_nats": float(of.max())}
    return figures


def _is_fresh(generation: Generation) -> np.ndarray:
    """Return which tokens' keys and values are all of the weights that sampled them, bool [N]."""
    if generation.kv_versions is None:
        return np.ones(len(generation.token_ids), np.bool_)
    fresh: np.ndarray = generation.kv_versions == generation.policy_versions
    return fresh


@torch.inference_mode()
def _logprobs(model: Qwen3ForCausalLM, answer: Answer) -> np.ndarray:
    """Return the log-probs of an answer's tokens, [N] nats, from one pass over all of its tokens."""
    tokens = torch.tensor([[*answer.prompt, *answer.generation.token_ids.tolist()]])
    tokens = tokens.to(next(model.parameters()).device)
    logits = model(input_ids=tokens, use_cache=False).logits[0, len(answer.prompt) - 1 : -1]
    logprobs = logits.float().log_softmax(-1).gather(1, tokens[0, len(answer.prompt) :, None])
    found: np.ndarray = logprobs[:, 0].cpu().numpy()
    return found
