"""Which GPUs of a host the engines of one actor process use. Loads without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.engines.sglang.server.gpu_count import base_gpu_id, gpus_of_host
from actors.settings.actors import ActorsConfig
from actors.settings.engines import EngineConfig


@dataclass(frozen=True)
class GpuPlan:
    """The first GPU of each engine that a process starts. No two have one in common, except where the user
    says which GPU is an engine's first (`server.base_gpu_id`)."""

    rollouts: tuple[int, ...]
    opponents: Mapping[str, int] = field(default_factory=dict)
    """That of each opponent's engine, by the opponent's name."""
    evaluation: tuple[int, ...] = ()
    """First GPUs of the servers that `evaluation.servers` asks for."""
    policies: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """First GPUs of each further policy's engines, by its name."""


def gpu_plan(actors: ActorsConfig, policies: Mapping[str, EngineConfig] | None = None) -> GpuPlan:
    """Return the plan of an actor that serves these further policies too. Each engine comes after the others.
    Raises `ConfigError` for a parallel size that is no number."""
    engines, further = actors.fleet.engines, policies or {}
    begun = _Count()
    return GpuPlan(
        rollouts=begun.take(actors.engine, engines),
        opponents={
            name: begun.take(actors.engine if one.engine == "same" else None, 1)[0]
            for name, one in actors.opponents.items()
        },
        evaluation=begun.take(_evaluating(actors), actors.evaluation.servers),
        policies={name: begun.take(engine, engines) for name, engine in further.items()},
    )


def gpus_used(engine: EngineConfig, first_gpus: tuple[int, ...]) -> set[int]:
    settings = engine.servers.settings
    if engine.in_process or settings.get("device") == "cpu":
        return set()
    firsts = [base_gpu_id(settings, first) for first in first_gpus]
    return {gpu for first in firsts for gpu in range(first, first + gpus_of_host(engine))}


class _Count:
    def __init__(self) -> None:
        self._taken = 0

    def take(self, engine: EngineConfig | None, engines: int) -> tuple[int, ...]:
        """Return the first GPU of each of several engines; those in this process or at a URL take none."""
        each = gpus_of_host(engine) if engine is not None else 0
        first, self._taken = self._taken, self._taken + each * engines
        return tuple(first + each * number for number in range(engines))


def _evaluating(actors: ActorsConfig) -> EngineConfig:
    """Return the settings of a server for held-out prompts: it is started, though the others run already."""
    return actors.engine.servers.model_copy(update={"url": None, "urls": ()})
