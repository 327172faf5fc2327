"""Which low-rank adapters an SGLang server adds to its frozen weights itself. Loads without torch."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

from actors.settings.engines import EngineConfig
from bus.errors import ConfigError
from bus.messages import AdaptedBase

KNOWN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Layers whose adapters are loaded into SGLang, by the last parts of their names."""
SHARED_EXPERT = "shared_expert"
"""Where a layer is in an expert of all tokens: SGLang computes some of these with the other experts."""
ROUTED_EXPERTS = "experts"
"""Where experts lie that a router chooses."""
BESIDE_NEWEST = 1
"""The learner is a version ahead of the steps whose rollouts are under way."""
BESIDE_OLDEST = 1
"""The next version comes before the oldest goes."""
SETTING = 'actors.engine.adapter="loaded"'
WHOLE_WEIGHTS = (
    f"{SETTING}: the learner publishes whole weights: train adapters with learner.lora.rank, with "
    "learner.lora.publish=adapter, or set actors.engine.adapter=merged"
)


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """What a server is started for, so that it can have the adapters of one policy or of several."""

    rank: int
    """The highest of all policies."""
    modules: tuple[str, ...]
    """Last parts of the names of the layers that have an adapter in some policy, as `q_proj`."""
    slots: int
    """Adapters that the server may have, in a batch too: the next comes before the oldest goes."""

    def __or__(self, other: "AdapterRoom") -> "AdapterRoom":
        """Return the room for both. One adapter is loaded at a time, so that one more is enough for all."""
        return AdapterRoom(
            rank=max(self.rank, other.rank),
            modules=tuple(sorted({*self.modules, *other.modules})),
            slots=self.slots + other.slots - BESIDE_OLDEST,
        )


@dataclass(frozen=True, slots=True)
class ServedAdapters:
    """The adapters of one policy, of which a server has one for each of its newest versions."""

    rank: int
    scale: float
    """Factor of B A."""
    modules: tuple[str, ...]
    """Last parts of the names of the layers that have one, as `q_proj`."""
    versions: int
    """Versions that a server has at once: those that rollouts within the staleness bound may have."""
    base: str = ""
    """Digest of the frozen weights that policies on the same servers share; empty where there is one."""
    beside: AdapterRoom | None = None
    """Room that the other policies on the same servers need."""

    @property
    def room(self) -> AdapterRoom:
        own = AdapterRoom(rank=self.rank, modules=self.modules, slots=self.versions + BESIDE_OLDEST)
        return own if self.beside is None else own | self.beside

    def sharing(self, others: Iterable["ServedAdapters"], base: str) -> "ServedAdapters":
        """Return these adapters for servers with the frozen weights of digest `base` for `others` too."""
        rooms = [one.room for one in others]
        return replace(self, base=base, beside=reduce(or_, rooms) if rooms else None)

    def refuse_others(self, adapted: AdaptedBase | None) -> None:
        """Raise `ConfigError` for a later announcement of other adapters, or of whole weights."""
        if adapted is None:
            raise ConfigError(WHOLE_WEIGHTS)
        announced = (adapted.rank, adapted.scale, _layers(adapted))
        if announced != (self.rank, self.scale, self.modules):
            raise ConfigError(
                f"{SETTING}: the learner's adapters are of rank {adapted.rank} and scale "
                f"{adapted.scale:g} in {', '.join(_layers(adapted))} now, and the servers were started for "
                f"rank {self.rank} and scale {self.scale:g} in {', '.join(self.modules)}: start this actor "
                "again"
            )
        if self.base and adapted.identity != self.base:
            raise ConfigError(
                f"{SETTING}: the learner's frozen weights are others now than those that the servers have "
                "for several policies: start this actor again"
            )


def served_adapters(
    config: EngineConfig, adapted: AdaptedBase | None, *, max_staleness: int
) -> ServedAdapters | None:
    """Return the adapters that engines with these settings serve; None where they take whole weights.
    `adapted` is what the policy's announcements say of its adapters. Raises `ConfigError` for a policy
    without any, and for adapters that SGLang does not serve."""
    if not config.adds_adapters:
        return None
    if adapted is None:
        raise ConfigError(WHOLE_WEIGHTS)
    if not adapted.rank:
        raise ConfigError(
            f"{SETTING}: the learner is of an older Sluice than this actor, and does not say of which rank "
            "its adapters are: start it again with this one, or set actors.engine.adapter=merged"
        )
    if adapted.weight_decomposed:
        raise ConfigError(
            f"{SETTING}: the learner trains lengths of rows too (learner.lora.weight_decomposed), and SGLang "
            "adds no such adapters: set actors.engine.adapter=merged"
        )
    for module in adapted.modules:
        parent, _, name = module.rpartition(".")
        if parent.rpartition(".")[2] == ROUTED_EXPERTS:
            raise ConfigError(
                f"{SETTING}: no adapters of routed experts, as {module}, are loaded into SGLang: start a run "
                "without learner.lora.experts, or set actors.engine.adapter=merged"
            )
        if name not in KNOWN or SHARED_EXPERT in parent:
            raise ConfigError(
                f"{SETTING}: no adapter of {module} is loaded into SGLang: start a run without it in "
                "learner.lora.targets, or set actors.engine.adapter=merged"
            )
    return ServedAdapters(
        rank=adapted.rank,
        scale=adapted.scale,
        modules=_layers(adapted),
        versions=max_staleness + 1 + BESIDE_NEWEST,
    )


def _layers(adapted: AdaptedBase) -> tuple[str, ...]:
    """Return the last parts of the names of the layers that have an adapter."""
    return tuple(sorted({module.rpartition(".")[2] for module in adapted.modules}))
