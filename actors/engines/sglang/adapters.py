"""The adapters of one SGLang server: each policy version is loaded as one of its own, beside those before it.

SGLang 0.5.23 loads an adapter between two batches, without a pause, and unloads it when no request has it any
more; meanwhile it loads no other. So an adapter is unloaded only after all requests that have it were ended.
It keys cached prefixes by adapter, and refuses requests for adapters that it does not have."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import torch
from xxhash import xxh3_64

from actors.engines.base import Generation
from actors.engines.config import SglangEngineConfig
from actors.engines.served_adapters import ServedAdapters
from actors.engines.sglang.client import LOAD_ADAPTER, Json, SglangClient
from actors.engines.sglang.server_facts import ServerFacts
from actors.engines.sglang.settings import device_of
from actors.engines.sglang.tensor_files import State, on_host, pickled, raw
from actors.engines.sglang.weights import HeldWeights
from bus.errors import ConfigError, EngineError
from bus.waiting import left_s
from storage.weights.adapter_names import PREFIX, WEIGHT, adapter_names

OURS = "sluice-"
"""Begins the names of all adapters that an actor loads."""
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that SGLang computes as one: it takes adapters of all of them, or of none."""
WITH_EXPERTS = ("gate_proj", "up_proj", "down_proj")
"""Layers by whose names SGLang takes those of experts, too."""
ALL_MODULES = "all"


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """One version of the policy in a server."""

    name: str
    policy_version: int
    base_version: int
    """Version of the frozen weights under it, as the server names them."""

    def drew(self, generation: Generation) -> Generation:
        """Return what a request for this adapter was answered, whose tokens are all of its version.

        Raises `EngineError` where the server drew some of them with other weights under it."""
        other = np.flatnonzero(generation.policy_versions != self.base_version)
        if len(other):
            raise EngineError(
                f"token {other[0]} of {len(other)} was drawn with weights of version "
                f"{generation.policy_versions[other[0]]}, and those of adapter {self.name} are of version "
                f"{self.base_version}"
            )
        versions = np.full(len(generation.token_ids), self.policy_version, np.int32)
        return replace(generation, policy_versions=versions)


End = Callable[[LoadedAdapter], Awaitable[None]]
"""Ends the requests that have an adapter: they go on with the newest."""


class Adapters:
    """The newest adapter of the policy on this host, and those that the server has."""

    def __init__(self, client: SglangClient, facts: ServerFacts, served: ServedAdapters) -> None:
        self.newest: LoadedAdapter | None = None
        """What new requests have."""
        self._client = client
        self._facts = facts
        self._served = served
        self._tensors: dict[str, torch.Tensor] = {}
        self._loaded: list[LoadedAdapter] = []
        """What the server has, the oldest first."""
        engine = uuid.uuid4().hex[:8]
        self._names = (f"{OURS}{engine}-{number}" for number in count())

    def check(self, *, has_experts: bool) -> None:
        """Raise `ConfigError` for a server, or a mixture of experts, that cannot have the adapters."""
        refuse_unfit(self._client.url, self._facts, self._served)
        dense = sorted({*self._served.modules} & {*WITH_EXPERTS})
        if has_experts and dense:
            raise ConfigError(
                f'actors.engine.adapter="loaded": the policy is a mixture of experts with adapters of '
                f"{', '.join(dense)}, and SGLang would look for those of its experts: name layers of the "
                "attention alone in learner.lora.targets, or set actors.engine.adapter=merged"
            )

    async def clear(self, end_s: float) -> None:
        """Free the server of all that this engine, or an actor before it, loaded there."""
        self._loaded.clear()
        self.newest = None
        for name in await self._client.adapters():
            if name.startswith(OURS):
                await self._client.unload_adapter(name, left_s(end_s))

    async def load(
        self, changed: State, policy_version: int, base: HeldWeights, *,
        end: End, end_s: float,
    ) -> None:  # fmt: skip
        """Load a version, until `end_s` of the monotonic clock.

        Args:
            changed: A and B by peft's names, the first time all of them.
            policy_version: what requests from now on have.
            base: the frozen weights that the server has.
            end: is called with an adapter that is too old.
            end_s: by when, of the monotonic clock.

        Raises `EngineError`; then it is not certain what the server has."""
        self._tensors.update(changed)
        self._refuse_others()
        await self._unload_old(end, end_s)  # more than one too many only where loads were cancelled
        body = await asyncio.to_thread(self._body, f"{next(self._names)}-v{policy_version}", base.tensors)
        loaded = LoadedAdapter(body["lora_name"], policy_version, base.policy_version)
        self._loaded.append(loaded)  # before: a caller that is cancelled does not know whether it got there
        await self._client.load_adapter(body, left_s(end_s))
        self.newest = loaded
        await self._unload_old(end, end_s)

    def _body(self, name: str, base: State) -> Json:
        """Return the request that loads them, by a name to which their digest is added."""
        tensors = with_partners(self._tensors, base)
        return {
            "lora_name": f"{name}-{_digest(self._tensors)}",
            "config_dict": _config(self._served, tensors),
            "serialized_named_tensors": [pickled(on_host(tensors))] * self._facts.tensor_ranks,
        }

    async def _unload_old(self, end: End, end_s: float) -> None:
        """Leave the server as many as it may have, after the requests that have others were ended."""
        while len(self._loaded) > self._served.versions:
            old = next(one for one in self._loaded if one is not self.newest)
            await end(old)
            if old.name in await self._client.adapters():
                await self._client.unload_adapter(old.name, left_s(end_s))
            self._loaded.remove(old)

    def _refuse_others(self) -> None:
        """Raise `EngineError` unless all tensors are of the adapters that the server was started for."""
        if not self._tensors:
            raise EngineError(
                "no adapters came with the frozen weights: the learner publishes whole weights now "
                "(learner.lora.publish): set actors.engine.adapter=merged"
            )
        for name, tensor in self._tensors.items():
            rank = tensor.shape[0 if ".lora_A." in name else 1]
            if rank != self._served.rank:
                raise EngineError(
                    f"adapter {name} is of rank {rank}, and the server was started for rank "
                    f"{self._served.rank}: start this actor again"
                )


def serving(config: SglangEngineConfig, served: ServedAdapters | None) -> SglangEngineConfig:
    """Return the settings of an engine whose server, if it is started here, takes these adapters.

    The user's own settings of the server have the last word."""
    if served is None or config.attached:
        return config
    flags = {"lora_backend": "torch_native"} if device_of(config.settings) == "cpu" else {}
    return config.model_copy(update={"server": {**flags, **_flags(served), **config.settings}})


def refuse_unfit(url: str, facts: ServerFacts, served: ServedAdapters) -> None:
    """Raise `ConfigError` for a server that cannot have these adapters at once."""
    [server] = facts.settings
    missing = _missing(server, served)
    if not facts.loads_adapters:
        missing = f"has no {LOAD_ADAPTER} (SGLang {facts.version})"
    if facts.replicas > 1:
        missing = (
            f"has {facts.replicas} replicas (dp_size times pp_size), into which SGLang loads no adapters"
        )
    if missing:
        flags = " ".join(
            f"--{name.replace('_', '-')} {_written(v)}".strip() for name, v in _flags(served).items()
        )
        raise ConfigError(
            f'actors.engine.adapter="loaded": the server at {url} {missing}: start one of SGLang 0.5.23 or '
            f"later with {flags}, or set actors.engine.adapter=merged"
        )


def _missing(server: Mapping[str, object], served: ServedAdapters) -> str:
    """Return what is wrong with a server's own settings; an empty string where nothing is."""
    if not server.get("enable_lora"):
        return "was started without --enable-lora"
    wanted: Iterable[tuple[str, int]] = (
        ("max_lora_rank", served.rank),
        ("max_loras_per_batch", served.slots),
        ("max_loaded_loras", served.slots),
    )
    for name, least in wanted:
        has = server.get(name)
        if has is not None and int(str(has)) < least:
            return f"has {name}={has}, and {least} are needed"
    there = set(map(str, _listed(server.get("lora_target_modules"))))
    lacks = set(served.modules) - there
    if lacks and ALL_MODULES not in there:
        return f"has lora_target_modules={sorted(there)} without {', '.join(sorted(lacks))}"
    return ""


def _listed(value: object) -> Iterable[object]:
    return value if isinstance(value, list | tuple | set) else ()


def _flags(served: ServedAdapters) -> dict[str, bool | int | tuple[str, ...]]:
    return {
        "enable_lora": True,
        "max_lora_rank": served.rank,
        "lora_target_modules": served.modules,
        "max_loras_per_batch": served.slots,
        "max_loaded_loras": served.slots,
    }


def _written(value: bool | int | tuple[str, ...]) -> str:
    """Return what a command line has after the name of a setting."""
    if isinstance(value, bool):
        return ""
    return " ".join(value) if isinstance(value, tuple) else str(value)


def with_partners(adapters: State, base: State) -> dict[str, torch.Tensor]:
    """Return adapters with zeros for those layers without one that SGLang computes together with others."""
    found = dict(adapters)
    for name, tensor in adapters.items():
        module = name.removeprefix(PREFIX).rpartition(".lora_")[0]
        parent, _, own = module.rpartition(".")
        for partner in next((layers for layers in FUSED if own in layers), ()):
            weight = f"{parent}.{partner}{WEIGHT}"
            a, b = adapter_names(weight)
            if a not in found and ".lora_A." in name:
                found[a] = torch.zeros_like(tensor)
                found[b] = tensor.new_zeros(base[weight].shape[0], tensor.shape[0])
    return found


def split(state: State) -> tuple[State, State]:
    """Return the frozen weights and the adapters among tensors."""
    adapters = {name: tensor for name, tensor in state.items() if name.startswith(PREFIX)}
    return {name: tensor for name, tensor in state.items() if name not in adapters}, adapters


def _config(served: ServedAdapters, tensors: State) -> Json:
    """Return what SGLang reads of peft's adapter_config.json, which knows no scale but alpha over rank."""
    modules = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors}
    return {
        "peft_type": "LORA",
        "r": served.rank,
        "lora_alpha": served.scale * served.rank,
        "target_modules": sorted(modules),
    }


def _digest(tensors: State) -> str:
    """Return a digest of what an adapter is."""
    digest = xxh3_64()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(raw(tensors[name]).numpy().data)
    return digest.hexdigest()
