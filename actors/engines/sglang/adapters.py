"""A policy's adapters in one SGLang server: each version is loaded as one of its own, beside those before it.

SGLang 0.5.23 loads an adapter between two batches, without a pause, and unloads it when no request has it any
more; meanwhile it loads no other. So an adapter is unloaded only after all requests that have it were ended.
It keys cached prefixes by adapter, and fails requests for adapters that it does not have: one that it has had
it looks for in files, and on Hugging Face's hub unless HF_HUB_OFFLINE is set, where there is none."""

import asyncio
import json
import time
import uuid
from collections.abc import Iterable, Mapping
from itertools import count

import torch
from xxhash import xxh3_64

from actors.engines.served_adapters import AdapterRoom, ServedAdapters
from actors.engines.sglang import requests_in_progress
from actors.engines.sglang.client.client import LOAD_ADAPTER, Json, SglangClient
from actors.engines.sglang.client.server_facts import ServerFacts
from actors.engines.sglang.client.tensor_files import State, on_host, pickled, raw
from actors.engines.sglang.loaded_adapter import LoadedAdapter
from actors.engines.sglang.requests_in_progress import RequestsInProgress
from actors.engines.sglang.server.settings import device_of
from actors.engines.sglang.weights import HeldWeights
from actors.settings.engines import SglangEngineConfig
from bus.errors import ConfigError, EngineError, WeightsKeptError
from bus.waiting import left_s
from storage.model_files.adapter_names import PREFIX, WEIGHT, adapter_names

OURS = "sluice-"
"""Begins the names of all adapters that an actor loads."""
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that SGLang computes as one: it takes adapters of all of them, or of none."""
WITH_EXPERTS = ("gate_proj", "up_proj", "down_proj")
"""Layers by whose names SGLang takes those of experts, too."""
ALL_MODULES = "all"


class Adapters:
    """The newest adapter of the policy on this host, and those that the server has."""

    def __init__(
        self, client: SglangClient, facts: ServerFacts, served: ServedAdapters, requests: RequestsInProgress,
        *, policy: str = "",
    ) -> None:  # fmt: skip
        """`requests` are all of the server; `policy` names one of several that it serves."""
        self.newest: LoadedAdapter | None = None
        """What new requests have; None while the frozen weights are loaded."""
        self._client = client
        self._facts = facts
        self._served = served
        self._requests = requests
        self._tensors: dict[str, torch.Tensor] = {}
        self._loaded: list[LoadedAdapter] = []
        """What the server has, the oldest first."""
        self._policy = policy
        engine = uuid.uuid4().hex[:8]
        self._names = (f"{OURS}{engine}-{number}" for number in count())

    async def check(self, *, has_experts: bool) -> None:
        """Raise `ConfigError` for a server, or a mixture of experts, that cannot have the adapters. So is a
        server where adapters of others leave too little room: it would unload one for another."""
        refuse_unfit(self._client.url, self._facts, self._served)
        others = [name for name in await self._client.adapters() if not name.startswith(OURS)]
        room, needed = self._facts.settings[0].get("max_loaded_loras"), self._served.room.slots + len(others)
        if room is not None and int(str(room)) < needed:
            raise ConfigError(
                f"{self._client.url} has max_loaded_loras={room} and {len(others)} adapters of others, as "
                f"{others[0]}: unload these, or start it with --max-loaded-loras {needed}"
            )
        dense = sorted({*self._served.modules} & {*WITH_EXPERTS})
        if has_experts and dense:
            raise ConfigError(
                f'actors.engine.adapter="loaded": the policy is a mixture of experts with adapters of '
                f"{', '.join(dense)}, and SGLang would look for those of its experts: name layers of the "
                "attention alone in learner.lora.targets, or set actors.engine.adapter=merged"
            )

    def present(self) -> LoadedAdapter:
        """Return the newest. Raises `EngineError` where the server has its frozen weights alone."""
        if self.newest is None:
            raise EngineError("the server has no adapter of the policy yet: it loads its frozen weights")
        return self.newest

    def refuse_version(self, changed: State, base: State) -> None:
        """Raise `WeightsKeptError` where adapters of a version are none that the server was started for. The
        server is asked for nothing before: it goes on, with the version that it has and with all other
        policies. `changed` and `base` are as in `load`."""
        tensors = {**self._tensors, **changed}
        whose = f"policy {self._policy!r}" if self._policy else "the run's own policy"
        if not tensors:
            raise WeightsKeptError(
                f"no adapters of {whose} came with the frozen weights: its learner publishes whole weights "
                "now (learner.lora.publish): set actors.engine.adapter=merged"
            )
        for name, tensor in tensors.items():
            if wrong := _unfit(name, tensor, base, self._served.rank):
                raise WeightsKeptError(
                    f"adapter {name} of {whose} {wrong}: start its learner with the settings of before "
                    "(learner.lora), or start this actor again"
                )

    def forget(self) -> None:
        self.newest = None
        self._loaded.clear()

    async def clear(self, timeout_s: float) -> None:
        """Free the server of all that this engine, or an actor before it, loaded there for any policy."""
        end_s = time.monotonic() + timeout_s
        for name in await self._client.adapters():
            if name.startswith(OURS):
                await self._unload_called(name, end_s)

    async def load(self, changed: State, policy_version: int, base: HeldWeights, timeout_s: float) -> float:
        """Load a version, which requests from now on have; return the seconds that it took.

        Requests that have one which is too old are ended: they go on with the newest. `changed` has A and B
        by peft's names, the first time all of them; `base` are the frozen weights that the server has.
        Raises `EngineError`; then it is not certain what the server has."""
        begun = time.monotonic()
        end_s = begun + timeout_s
        self._tensors.update(changed)
        while len(self._loaded) > self._served.versions:  # loads were cancelled
            await self._unload(next(one for one in self._loaded if one is not self.newest), end_s)
        name = f"{next(self._names)}-v{policy_version}"
        name, body = await asyncio.to_thread(self._request, name, base.tensors)
        loaded = LoadedAdapter(name, policy_version, base.policy_version)
        self._loaded.append(loaded)  # before: a caller that is cancelled does not know whether it got there
        await self._client.load_adapter(body, left_s(end_s))
        self.newest = loaded
        for old in self._too_old(loaded):
            await self._unload(old, end_s)
        return time.monotonic() - begun

    def _request(self, name: str, base: State) -> tuple[str, bytes]:
        """Return the name, to which a digest is added, and the JSON that has the server load them by it."""
        tensors, name = with_fused_layers(self._tensors, base), f"{name}-{_digest(self._tensors)}"
        name = f"{name}-{self._policy}" if self._policy else name
        body = {
            "lora_name": name,
            "config_dict": _config(self._served, tensors),
            "serialized_named_tensors": [pickled(on_host(tensors))] * self._facts.tensor_ranks,
        }
        return name, json.dumps(body).encode()

    def _too_old(self, newest: LoadedAdapter) -> list[LoadedAdapter]:
        """Return adapters whose tokens would be outside the staleness bound, or of a learner that died: the
        one that resumed from an older step makes their versions again."""
        versions, before = self._served.versions, self._loaded[:-1]
        first = newest.policy_version - versions + 1
        surplus = before[: max(0, len(self._loaded) - versions)]  # loads were cancelled
        return [
            one for one in before if one in surplus or not first <= one.policy_version < newest.policy_version
        ]

    async def _unload(self, old: LoadedAdapter, end_s: float) -> None:
        await self._requests.interrupt(left_s(end_s), only=lambda request: request.adapter is old)
        if old.name in await self._client.adapters():
            await self._unload_called(old.name, end_s)
        self._loaded.remove(old)

    async def _unload_called(self, name: str, end_s: float) -> None:
        """Unload one by its name, which waits for abandoned requests: the abort of one may be lost."""
        unloading = asyncio.create_task(self._client.unload_adapter(name, left_s(end_s)))
        try:
            await asyncio.wait({unloading}, timeout=requests_in_progress.ABORT_ALL_AFTER_S)
            if not unloading.done():
                await self._requests.abort_all()
            await unloading
        finally:
            unloading.cancel()


def serving(config: SglangEngineConfig, served: ServedAdapters | None) -> SglangEngineConfig:
    """Return the settings of an engine whose server, if it is started here, takes these adapters. The user's
    own settings of the server have the last word."""
    if served is None or config.attached:
        return config
    flags = {"lora_backend": "torch_native"} if device_of(config.settings) == "cpu" else {}
    return config.model_copy(update={"server": {**flags, **_flags(served.room), **config.settings}})


def refuse_unfit(url: str, facts: ServerFacts, served: ServedAdapters) -> None:
    """Raise `ConfigError` for a server that cannot have these adapters at once."""
    [server] = facts.settings
    missing = _missing(server, served.room)
    if not facts.loads_adapters:
        missing = f"has no {LOAD_ADAPTER} (SGLang {facts.version})"
    if facts.replicas > 1:
        missing = (
            f"has {facts.replicas} replicas (dp_size times pp_size), into which SGLang loads no adapters"
        )
    if missing:
        flags = " ".join(
            f"--{name.replace('_', '-')} {_written(v)}".strip() for name, v in _flags(served.room).items()
        )
        raise ConfigError(
            f'actors.engine.adapter="loaded": the server at {url} {missing}: start one of SGLang 0.5.23 or '
            f"later with {flags}, or set actors.engine.adapter=merged"
        )


def _missing(server: Mapping[str, object], room: AdapterRoom) -> str:
    """Return what is wrong with a server's own settings; an empty string where nothing is."""
    if not server.get("enable_lora"):
        return "was started without --enable-lora"
    wanted: Iterable[tuple[str, int]] = (
        ("max_lora_rank", room.rank),
        ("max_loras_per_batch", room.slots),
        ("max_loaded_loras", room.slots),
    )
    for name, least in wanted:
        has = server.get(name)
        if has is not None and int(str(has)) < least:
            return f"has {name}={has}, and {least} are needed"
    there = set(map(str, _listed(server.get("lora_target_modules"))))
    lacks = set(room.modules) - there
    if lacks and ALL_MODULES not in there:
        return f"has lora_target_modules={sorted(there)} without {', '.join(sorted(lacks))}"
    return ""


def _listed(value: object) -> Iterable[object]:
    return value if isinstance(value, list | tuple | set) else ()


def _flags(room: AdapterRoom) -> dict[str, bool | int | tuple[str, ...]]:
    return {
        "enable_lora": True,
        "max_lora_rank": room.rank,
        "lora_target_modules": room.modules,
        "max_loras_per_batch": room.slots,
        "max_loaded_loras": room.slots,
    }


def _written(value: bool | int | tuple[str, ...]) -> str:
    """Return what a command line has after the name of a setting."""
    if isinstance(value, bool):
        return ""
    return " ".join(value) if isinstance(value, tuple) else str(value)


def _unfit(name: str, tensor: torch.Tensor, base: State, rank: int) -> str:
    """Return what is wrong with A or B of a layer; an empty string where nothing is."""
    module, _, which = name.removeprefix(PREFIX).removesuffix(WEIGHT).rpartition(".lora_")
    weight = base.get(f"{module}{WEIGHT}")
    if weight is None or which not in ("A", "B"):
        return "belongs to none of the frozen weights"
    is_a = which == "A"
    found = tensor.shape[0 if is_a else -1]
    if found != rank:
        return f"is of rank {found}, and the server was started for rank {rank}"
    fits = (rank, weight.shape[1]) if is_a else (weight.shape[0], rank)
    if tuple(tensor.shape) != fits:
        return f"is of shape {list(tensor.shape)}, and its weight takes {list(fits)}"
    return ""


def with_fused_layers(adapters: State, base: State) -> dict[str, torch.Tensor]:
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
    digest = xxh3_64()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(raw(tensors[name]).numpy().data)
    return digest.hexdigest()
