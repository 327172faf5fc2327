"""What a configuration costs on given GPUs: memory, seconds, and who waits for whom."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError
from transformers import PretrainedConfig

from actors.engines.expert_routing import IN_A_BYTE, Routing
from actors.engines.sglang.server.gpu_count import gpus_of_engine
from bus.errors import ConfigError
from launch.model_files.hub_model import is_hub_name
from launch.model_files.hub_revision import pinned
from launch.model_files.model_directory import model_on_disk
from launch.plan.memory import Model, RankMemory, actor_host, checkpoint_bytes, learner_host, learner_rank
from launch.plan.sizes import is_mixture, kv_bytes, size, weights_of
from launch.settings.run_config import RunConfig, merge
from learner.backends.shared.trainable import TrainableWeights
from learner.backends.suitability import refuse_untrainable, trains
from learner.config.backend import refuse_other_world
from learner.config.learner import LearnerConfig
from learner.config.model import ModelConfig
from learner.data.balancing import FORWARD_AND_BACKWARD, forward_flops
from learner.initial.scratch_model import scratch_config
from learner.metrics.gpus import Gpu
from learner.model_directories.model_directory import load_hf_config
from storage.disk.run_directory import RunDirectory

LARGE = 1_500_000_000
"""Parameters from which the figures of large models stand, and below which those of small ones."""
MFU = {
    ("megatron", "small"): 0.47,
    ("megatron", "large"): 0.54,
    ("megatron", "small mixture"): 0.24,
    ("megatron", "large mixture"): 0.35,
    ("fsdp", "small"): 0.35,
    ("fsdp", "large"): 0.40,
    ("fsdp", "small mixture"): 0.28,
    ("fsdp", "large mixture"): 0.28,
}
"""Measured share of a GPU's peak FLOPs by backend and kind of model, without recompute: a Qwen3-0.6B, the
shapes of 1.7B to 8B, a mixture of 1.0 billion weights, four layers of a 30B-A3B. Large models on FSDP are not
measured: the dense ones go by the ratio of the 0.6B, the mixture by the small one."""
RECOMPUTED = 0.80
"""Speed with full recompute, in units of that without: 0.80 of the 0.6B and of the 8B shape."""
LORA = 1.03
"""Speed of adapters of the 0.6B, in units of whole weights."""
SHARED = {"data": 0.96, "tensor": 0.5, "context": 0.43, "expert": 0.84}
"""Speed a GPU of two in units of one alone, by what they share. Layers of larger models lose less."""
PIPELINE = 0.84
"""The same of two stages, apart from the time that they idle while a pipeline fills and drains."""
DECODE_STEP_S = 0.006
"""Seconds of a step of SGLang besides reading weights and keys: 256 answers of a 0.6B grow by 38,200 tokens a
second (docs/performance.md)."""
BANDWIDTH = 0.6
"""Share of its bandwidth at which a GPU reads weights and keys; assumed, not measured."""


def mfu(model: Model, learner: LearnerConfig, ranks: int, micro_batches: int) -> float:
    """Return the share of the peak FLOPs that ranks of this layout reach, recomputed work not counted."""
    config, parallel = model.hf_config.get_text_config(), learner.parallel
    kind = "large" if model.parameters >= LARGE else "small"
    if is_mixture(config, model.layers - 1):
        kind += " mixture"
    found = MFU[learner.backend, kind]
    found *= RECOMPUTED if parallel.recompute == "full" else 1.0
    found *= LORA if learner.lora.exists else 1.0
    for name in ("tensor", "context", "expert"):
        found *= SHARED[name] if getattr(parallel, name) > 1 else 1.0
    if parallel.pipeline > 1:
        waiting = (parallel.pipeline - 1) / parallel.virtual_pipeline
        found *= PIPELINE * micro_batches / (micro_batches + waiting)
    if ranks > parallel.tensor * parallel.context * parallel.pipeline:
        found *= SHARED["data"]
    return found


def step_flops(hf_config: PretrainedConfig, sequences: int, tokens: int) -> float:
    """Return the FLOPs of a step on sequences of so many tokens, forward and backward, without recompute."""
    return FORWARD_AND_BACKWARD * forward_flops(hf_config, tokens) * sequences


def decode_tokens_per_s(model: Model, gpu: Gpu, gpus: int, requests: float, context: int) -> float:
    """Return the tokens a second of one engine on `gpus` of a host, at so many requests of a mean context. A
    step adds a token to each request. It reads the weights once, of a mixture all experts that some request
    chose, and all keys and values."""
    read = sum(one.elements * _chosen(model, one.sharing == "expert", requests) for one in model.weights)
    bytes_read = read * 2 + requests * context * kv_bytes(model.hf_config)
    return requests / (DECODE_STEP_S + bytes_read / (gpus * gpu.bytes_per_s * BANDWIDTH))


def _chosen(model: Model, is_expert: bool, requests: float) -> float:
    """Return the share of weights of this kind that a decoding step reads: an expert is not read where no
    request has chosen it."""
    config = model.hf_config.get_text_config()
    experts = size(config, "num_experts", "n_routed_experts", "num_local_experts")
    if not is_expert or not experts:
        return 1.0
    return 1 - math.pow(1 - size(config, "num_experts_per_tok") / experts, requests)


LEAST_TOKENS = 2048
"""Smallest micro-batch that is tried: matrix products of fewer tokens are slow."""
SIZES = (2, 4, 8, 16)
"""Numbers of ranks that share layers, experts or the depth of a model."""
LORA_RANK = 16
Flags = dict[str, str | int]


def alternatives(
    learner: LearnerConfig, model: Model, gpus: int, longest: int
) -> Iterator[tuple[tuple[str, ...], LearnerConfig]]:
    """Yield flags to add, and the settings with them: full recompute; besides it smaller micro-batches, down
    to the longest sequence; besides them more ranks for each model (tensor, then expert, then pipeline), on
    more of the GPUs where need be; moments in bfloat16; FSDP; at last adapters instead of whole weights."""
    has_fsdp = trains("fsdp", model.hf_config)
    for flags in _flags(learner, gpus, longest):
        if flags.get("learner.backend") == "fsdp" and not has_fsdp:
            continue
        try:
            changed = LearnerConfig.model_validate(_with(learner, flags))
            ranks = changed.world.processes * changed.world.nodes
            refuse_other_world(changed.parallel, ranks, changed.backend)
            if changed.backend == "megatron":
                refuse_untrainable(ModelConfig(), "megatron", model.hf_config, changed.parallel)
        except (ValidationError, ConfigError):  # not of this model, or not beside the other settings
            continue
        yield tuple(f"--{name.replace('_', '-')} {value}" for name, value in flags.items()), changed


def _flags(learner: LearnerConfig, gpus: int, longest: int) -> Iterator[Flags]:
    least: Flags = {"learner.parallel.recompute": "full"}
    yield dict(least)
    tokens = learner.batch.token_budget // 2
    while tokens >= max(LEAST_TOKENS, longest):
        least["learner.batch.tokens_per_micro_batch"] = tokens
        yield dict(least)
        tokens //= 2
    moments: Flags = {"learner.optimizer.state_dtype": "bfloat16"}
    layouts = list(_layouts(learner, gpus))
    for layout in layouts:
        yield {**least, **layout}
    yield {**least, **moments}
    for layout in layouts:
        yield {**least, **layout, **moments}
    for more in ({}, moments):
        for ranks in _more_ranks(learner, gpus):
            yield {**least, "learner.backend": "fsdp", **ranks, **more}
    yield {**least, "learner.lora.rank": LORA_RANK}


def _layouts(learner: LearnerConfig, gpus: int) -> Iterator[Flags]:
    for wanted in SIZES:
        for ranks in _more_ranks(learner, gpus):
            yield {"learner.parallel.tensor": wanted, "learner.parallel.sequence": "true", **ranks}
    for name in ("expert", "pipeline"):
        for wanted in SIZES:
            for ranks in _more_ranks(learner, gpus):
                yield {f"learner.parallel.{name}": wanted, **ranks}


def _more_ranks(learner: LearnerConfig, gpus: int) -> Iterator[Flags]:
    """Yield nothing to add, and then more ranks on each host."""
    yield {}
    nodes, processes = learner.world.nodes, learner.world.processes
    for wanted in SIZES:
        if wanted > processes and wanted * nodes <= gpus:
            yield {"learner.world.processes": wanted}


def _with(learner: LearnerConfig, flags: Mapping[str, str | int]) -> dict[str, Any]:
    found: dict[str, Any] = learner.model_dump()
    for name, value in flags.items():
        layer: Any = value
        for part in reversed(name.split(".")[1:]):
            layer = {part: layer}
        found = merge(found, layer)
    return found


GIB = 1 << 30
USABLE = 0.985
"""Share of the rest that torch's allocator gets to give out before its pieces no longer fit."""
MEM_FRACTION = 0.85
"""Share of a GPU that SGLang takes for weights, keys and values, unless `mem_fraction_static` says so."""
TRAJECTORY_TOKEN_BYTES = 13
"""Bytes of a token in a trajectory: its id, mask, log-prob and version."""
FEW_S = 30.0
"""Seconds of traffic below which a restart of storage makes actors wait."""
DELTA = 0.008
"""Bytes of a delta in units of a snapshot: measured at a learning rate of 1e-6 (docs/weights.md)."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked: GPUs, and the lengths that a run's prompts and answers have."""

    gpu: Gpu
    gpus: int
    """Number of GPUs of all hosts together."""
    prompt_tokens: int
    answer_tokens: int
    """Mean length of an answer."""

    @property
    def room(self) -> float:
        """Return the bytes of a GPU that a learner can use."""
        return (self.gpu.memory_gib - self.gpu.context_gib) * GIB * USABLE


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a configuration costs."""

    model_type: str
    parameters: int
    backend: str
    learner_gpus: int
    engine_gpus: int
    rank: RankMemory
    room: int
    """Bytes of a GPU that a rank may have."""
    learner_host: int
    actor_host: int
    checkpoint: int
    snapshot: int
    """Bytes of a whole version on the wire before compression."""
    delta: int
    kv_tokens: int
    """Tokens whose keys and values one engine holds; 0 where none is on a GPU."""
    requests: int
    """Requests of the longest length that all engines hold at once."""
    step_tokens: int
    step_bytes: int
    stream_bytes: int
    """Bytes that the streams of trajectories may hold together."""
    mfu: float
    step_s: float
    generation_s: float | None
    """Seconds in which all engines make a step's answers; None where none is on a GPU."""
    instead: tuple[str, ...] = ()
    """Settings with which a run fits that does not; nothing where none of those that are tried does."""

    @property
    def fits(self) -> bool:
        """Tell whether a learner's rank fits on a GPU."""
        return self.rank.total <= self.room

    @property
    def stream_s(self) -> float:
        """Return the seconds of traffic that the streams of trajectories hold while no shard takes any."""
        period_s = max(self.step_s, self.generation_s or 0.0)
        return self.stream_bytes * period_s / self.step_bytes

    @property
    def waits(self) -> str:
        """Say which side waits for the other."""
        if self.generation_s is None:
            return "no engine is on a GPU: the learner waits for engines on CPUs"
        longer, other = ("learner", "engines"), ("engines", "learner")
        first, second = other if self.step_s > self.generation_s else longer
        share = 1 - min(self.step_s, self.generation_s) / max(self.step_s, self.generation_s)
        return f"the {first} wait{'s' if first == 'learner' else ''} {share:.0%} of the time for the {second}"


def model_of(config: RunConfig, hf_config: PretrainedConfig, *, on_gpu: bool = True) -> Model:
    """Return what formulas need of the model. Raises `ConfigError` for one that the backend does not train as
    the settings divide it."""
    learner = config.learner
    refuse_untrainable(config.model, learner.backend, hf_config, learner.parallel)
    weights = weights_of(hf_config)
    chosen = TrainableWeights(config.model.freeze, config.model.train_only)
    frozen = chosen.frozen({one.name: [one.name] for one in weights})
    dtype = config.model.dtype
    if dtype == "auto":
        exact = config.model.numerics == "exact"
        dtype = "bfloat16" if on_gpu and not exact else "float32"
    item = 2 if dtype == "bfloat16" else 4
    return Model(
        hf_config=hf_config, weights=weights, frozen=frozenset(frozen), item_bytes=item, on_gpu=on_gpu
    )


def plan(config: RunConfig, hf_config: PretrainedConfig, asked: Question, *, instead: bool = True) -> Plan:
    """Return what a configuration costs, and what fits `instead` if it does not. Raises `ConfigError` for a
    model or a layout that is not trained, and for too few GPUs."""
    model = model_of(config, hf_config)
    found = _plan(config, model, asked)
    return found if found.fits or not instead else replace(found, instead=fitting(config, model, asked))


def _plan(config: RunConfig, model: Model, asked: Question) -> Plan:
    learner = config.learner
    ranks = learner.world.processes * learner.world.nodes
    if ranks > asked.gpus:
        raise ConfigError(
            f"learner.world.processes={learner.world.processes} on {learner.world.nodes} nodes are {ranks} "
            f"ranks, and there are {asked.gpus} GPUs: give --gpus {ranks} at least, or start fewer"
        )
    refuse_other_world(learner.parallel, ranks, learner.backend)
    length = asked.prompt_tokens + asked.answer_tokens
    longest = asked.prompt_tokens + config.sampling.max_new_tokens
    tokens = max(learner.batch.token_budget, longest)
    rank = learner_rank(model, learner, ranks, tokens)
    sequences = config.admission.groups_per_step * config.admission.samples_per_prompt
    step_tokens = sequences * length
    reached, step_s = _training(config, model, asked.gpu, sequences, length, tokens)
    published = model.parameters * model.item_bytes
    engines = _engines(config, model, asked, asked.gpus - ranks, longest)
    return Plan(
        model_type=model.hf_config.model_type,
        parameters=model.parameters,
        backend=learner.backend,
        learner_gpus=ranks,
        engine_gpus=asked.gpus - ranks,
        rank=rank,
        room=int(asked.room),
        learner_host=learner_host(model, learner, config.warmup, rank, published, ranks),
        actor_host=actor_host(published, embedded=config.actors.engine.in_process),
        checkpoint=checkpoint_bytes(model, learner),
        snapshot=published,
        delta=round(published * DELTA),
        kv_tokens=engines.kv_tokens,
        requests=engines.requests,
        step_tokens=step_tokens,
        step_bytes=step_tokens * trajectory_token_bytes(config, model.hf_config),
        stream_bytes=config.bus.streams.trajectories_mib << 20,
        mfu=reached,
        step_s=step_s,
        generation_s=_generation_s(model, asked, engines, sequences),
    )


def _training(
    config: RunConfig, model: Model, gpu: Gpu, sequences: int, length: int, tokens: int
) -> tuple[float, float]:
    """Return the MFU and the seconds of a step on sequences of so many tokens, `tokens` a micro-batch."""
    learner = config.learner
    ranks, shared = learner.world.processes * learner.world.nodes, learner.parallel
    copies = max(1, ranks // (shared.tensor * shared.pipeline * shared.context))
    reached = mfu(model, learner, ranks, max(1, round(sequences * length / copies / tokens)))
    return reached, step_flops(model.hf_config, sequences, length) / (ranks * gpu.peak_flops * reached)


@dataclass(frozen=True, slots=True)
class HeldTraffic:
    """What the streams of trajectories hold while no shard takes any, if all answers are as long as they may
    be."""

    stream_mib: int
    steps: float
    seconds: float | None
    """Seconds in which the learner trains on as much; None where its GPU is of no known kind."""

    @property
    def remedy(self) -> str:
        """Say what to set where that is less than a step or `FEW_S`; empty where it is enough."""
        enough = max(2 / self.steps, FEW_S / self.seconds if self.seconds else 0.0)
        if self.steps >= 1 and (self.seconds is None or self.seconds >= FEW_S):
            return ""
        return f"set bus.streams.trajectories_mib={math.ceil(enough * self.stream_mib)}, or actors wait soon"


def held_traffic(config: RunConfig, hf_config: PretrainedConfig, gpu: Gpu | None) -> HeldTraffic:
    """Return how long the streams of trajectories take what actors send while storage is away."""
    length, stream_mib = config.sampling.max_new_tokens, config.bus.streams.trajectories_mib
    sequences = config.admission.groups_per_step * config.admission.samples_per_prompt
    steps = (stream_mib << 20) / (sequences * length * trajectory_token_bytes(config, hf_config))
    if gpu is None:
        return HeldTraffic(stream_mib, steps, None)
    tokens = max(config.learner.batch.token_budget, length)
    _, step_s = _training(config, model_of(config, hf_config), gpu, sequences, length, tokens)
    return HeldTraffic(stream_mib, steps, steps * step_s)


def trajectory_token_bytes(config: RunConfig, hf_config: PretrainedConfig) -> int:
    """Return the bytes of a token in a trajectory, with those of the experts that it went to."""
    if not config.actors.engine.routed_experts:
        return TRAJECTORY_TOKEN_BYTES
    routing = Routing.of_config(hf_config.to_dict())
    expert_bytes = 1 if routing.experts <= IN_A_BYTE else 2
    return TRAJECTORY_TOKEN_BYTES + routing.layers * routing.per_token * expert_bytes


@dataclass(frozen=True, slots=True)
class _Engines:
    number: int
    gpus_each: int
    kv_tokens: int
    requests: int


def _engines(config: RunConfig, model: Model, asked: Question, gpus: int, longest: int) -> _Engines:
    """Return the engines on the GPUs that the learner leaves. An embedded engine computes on a CPU."""
    engine = config.actors.engine
    if engine.in_process:
        return _Engines(0, 1, 0, 0)
    each = max(1, gpus_of_engine(engine))
    if gpus < each:
        return _Engines(0, each, 0, 0)
    share = float(str(engine.servers.settings.get("mem_fraction_static", MEM_FRACTION)))
    free = each * asked.gpu.memory_gib * GIB * share - model.parameters * 2
    kv_tokens = max(0, int(free / kv_bytes(model.hf_config)))
    number = gpus // each
    return _Engines(number, each, kv_tokens, number * (kv_tokens // longest))


def _generation_s(model: Model, asked: Question, engines: _Engines, sequences: int) -> float | None:
    if not engines.requests:
        return None
    at_once = min(sequences, engines.requests) / engines.number
    mean_context = asked.prompt_tokens + asked.answer_tokens // 2
    rate = decode_tokens_per_s(model, asked.gpu, engines.gpus_each, at_once, mean_context)
    return sequences * asked.answer_tokens / (engines.number * rate)


def fitting(config: RunConfig, model: Model, asked: Question) -> tuple[str, ...]:
    """Return the first flags among `alternatives` with which a rank fits; none where none of them helps."""
    longest = asked.prompt_tokens + config.sampling.max_new_tokens
    for flags, learner in alternatives(config.learner, model, asked.gpus, longest):
        ranks = learner.world.processes * learner.world.nodes
        tokens = max(learner.batch.token_budget, longest)
        if learner_rank(model, learner, ranks, tokens).total <= asked.room:
            return flags
    return ()


def run_hf_config(config: RunConfig) -> PretrainedConfig:
    """Return the model's config.json, of the directory --model.path or as the scratch model has it. Nothing
    is fetched. Raises `ConfigError` where there is no readable config.json on this host."""
    if config.model.path is None:
        return scratch_config(config.model.scratch)
    found = model_on_disk(pinned(config.model.path, RunDirectory(config.directory, config.run)))
    if is_hub_name(found):
        raise ConfigError(
            f"model.path: {config.model.path} is not on this host, and nothing is fetched for a plan: "
            "fetch its config.json before, with `hf download NAME config.json`"
        )
    return load_hf_config(found)
