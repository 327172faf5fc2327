"""What a configuration costs on given GPUs: memory, seconds, and who waits for whom."""

from dataclasses import dataclass, replace

from transformers import PretrainedConfig

from actors.engines.sglang.server.gpu_count import gpus_of_engine
from bus.errors import ConfigError
from launch.model_files.hub_revision import pinned
from launch.model_files.model_directory import model_on_disk
from launch.plan.alternatives import alternatives
from launch.plan.memory import (
    Model,
    RankMemory,
    actor_host,
    checkpoint_bytes,
    learner_host,
    learner_rank,
)
from launch.plan.sizes import kv_bytes
from launch.plan.speed import decode_tokens_per_s, mfu, step_flops
from launch.plan.weights import weights_of
from launch.settings.run_config import RunConfig
from learner.backends.shared.trainable import TrainableWeights
from learner.backends.suitability import refuse_untrainable
from learner.config.backend import refuse_other_world
from learner.initial.scratch_model import scratch_config
from learner.metrics.gpus import Gpu
from learner.model_directories.model_directory import load_hf_config
from storage.disk.run_directory import RunDirectory

GIB = 1 << 30
CONTEXT_BYTES = 1 << 30
"""What CUDA takes of a GPU for each process."""
USABLE = 0.96
"""Share of the rest that torch's allocator gets to give out before its pieces no longer fit."""
MEM_FRACTION = 0.85
"""Share of a GPU that SGLang takes for weights, keys and values, unless `mem_fraction_static` says so."""
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
        return (self.gpu.memory_gib * GIB - CONTEXT_BYTES) * USABLE


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
    mfu: float
    step_s: float
    generation_s: float | None
    """Seconds in which all engines make a step's answers; None where none is on a GPU."""
    instead: tuple[str, ...] = ()
    """Settings with which it fits, where it does not; nothing where none of those that are tried does."""

    @property
    def fits(self) -> bool:
        """Tell whether a learner's rank fits on a GPU."""
        return self.rank.total <= self.room

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


def plan(config: RunConfig, hf_config: PretrainedConfig, asked: Question) -> Plan:
    """Return what a configuration costs, and what fits instead if it does not.

    Raises `ConfigError` for a model or a layout that is not trained, and for too few GPUs."""
    model = model_of(config, hf_config)
    found = _plan(config, model, asked)
    return found if found.fits else replace(found, instead=fitting(config, model, asked))


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
    shared = learner.parallel
    copies = max(1, ranks // (shared.tensor * shared.pipeline * shared.context))
    reached = mfu(model, learner, ranks, max(1, round(step_tokens / copies / tokens)))
    step_s = step_flops(model.hf_config, sequences, length) / (ranks * asked.gpu.peak_flops * reached)
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
        mfu=reached,
        step_s=step_s,
        generation_s=_generation_s(model, asked, engines, sequences, length),
    )


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


def _generation_s(
    model: Model, asked: Question, engines: _Engines, sequences: int, length: int
) -> float | None:
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
    is fetched.

    Raises `ConfigError` where there is no readable config.json on this host."""
    if config.model.path is None:
        return scratch_config(config.model.scratch)
    return load_hf_config(
        model_on_disk(pinned(config.model.path, RunDirectory(config.directory, config.run)))
    )
