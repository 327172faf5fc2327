"""How an SGLang server takes versions as adapters, beside frozen weights that all its policies share."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from actors.engines.sglang.adapters import Adapters, split
from actors.engines.sglang.client.tensor_files import State
from actors.engines.sglang.loading import Load, Loading
from actors.engines.sglang.served_policy import ServedPolicies, ServedPolicy
from actors.settings.engines import SglangEngineConfig
from bus.errors import EngineError

T = TypeVar("T")


class OrFail(Protocol):
    """Awaits what is to be done, and ends the server where that fails."""

    async def __call__(self, doing: Awaitable[T], what: str) -> T:
        """Return the result. Raises `EngineError`, which says `what` it did not do."""


class AdapterUpdates:
    """Brings new versions into one server; calls must not overlap."""

    def __init__(
        self, config: SglangEngineConfig, policies: ServedPolicies, loading: Loading, *,
        paused: Callable[[Load], Awaitable[tuple[int, float]]], or_fail: OrFail,
    ) -> None:  # fmt: skip
        """`paused` runs a load while nothing is generated, and returns the seconds that it took, too."""
        self._timeout_s = config.update_timeout_s
        self._config = config
        self._policies = policies
        self._loading = loading
        self._paused = paused
        self._or_fail = or_fail

    async def take(self, policy: ServedPolicy, state: State, policy_version: int) -> float:
        """Have the server load a version of a policy as an adapter of its own, beside those of requests.

        Its frozen weights are loaded before where they are new, or the server says that it has others: it was
        started again. Then the other policies' newest adapters are loaded again, too. Returns the seconds in
        which it may have stood still. Raises `EngineError`, and the server has ended then, but for a version
        that it cannot have `WeightsKeptError`, and it goes on."""
        base, changed = split(state)
        loading, pause_s, again = self._loading, 0.0, list[ServedPolicy]()
        _adapters(policy).refuse_version(changed, {**loading.held.tensors, **base})
        if not await asyncio.to_thread(loading.held.has, base) or not await loading.has_what_is_held():
            load = await loading.tensors(self._config, base, policy_version)
            for one in self._policies:
                if one.adapters is not None:  # adapters are of other weights from now on
                    one.adapters.forget()
            _, pause_s = await self._or_fail(self._paused(load), "take the frozen weights")
            await loading.taken()
            clearing = _adapters(policy).clear(self._timeout_s)
            await self._or_fail(clearing, "unload adapters of other weights")
            again = [one for one in self._policies if one is not policy and one.version >= 0]
        pause_s += await self._load(policy, changed, policy_version)
        for one in again:
            pause_s += await self._load(one, {}, one.version)
        self._policies.open()
        return pause_s

    async def _load(self, policy: ServedPolicy, changed: State, policy_version: int) -> float:
        taken = _adapters(policy).load(changed, policy_version, self._loading.held, self._timeout_s)
        load_s = await self._or_fail(taken, f"take policy version {policy_version}")
        policy.taken(policy_version)
        return load_s


def _adapters(policy: ServedPolicy) -> Adapters:
    if policy.adapters is None:
        raise EngineError("the server takes whole weights, and no adapters")
    return policy.adapters
