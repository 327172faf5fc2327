"""Settings that take less memory of a GPU, in the order in which `launch plan` tries them."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from bus.errors import ConfigError
from launch.plan.memory import Model
from launch.settings.run_config import merge
from learner.backends.suitability import refuse_untrainable, trains
from learner.config.backend import refuse_other_world
from learner.config.learner import LearnerConfig
from learner.config.model import ModelConfig

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
    for size in SIZES:
        for ranks in _more_ranks(learner, gpus):
            yield {"learner.parallel.tensor": size, "learner.parallel.sequence": "true", **ranks}
    for name in ("expert", "pipeline"):
        for size in SIZES:
            for ranks in _more_ranks(learner, gpus):
                yield {f"learner.parallel.{name}": size, **ranks}


def _more_ranks(learner: LearnerConfig, gpus: int) -> Iterator[Flags]:
    """Yield nothing to add, and then more ranks on each host."""
    yield {}
    nodes, processes = learner.world.nodes, learner.world.processes
    for size in SIZES:
        if size > processes and size * nodes <= gpus:
            yield {"learner.world.processes": size}


def _with(learner: LearnerConfig, flags: Mapping[str, str | int]) -> dict[str, Any]:
    found: dict[str, Any] = learner.model_dump()
    for name, value in flags.items():
        layer: Any = value
        for part in reversed(name.split(".")[1:]):
            layer = {part: layer}
        found = merge(found, layer)
    return found
