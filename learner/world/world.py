"""The ranks of one learner, led by rank 0: each call is carried out by all of them, in the same order."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

import structlog
import torch.distributed as dist
from transformers import PretrainedConfig

from bus.requests import BatchLease, GroupRef
from learner.config.batch import BatchConfig
from learner.config.process_settings import LearnerSettings
from learner.data.balancing import GroupWork, balanced
from learner.world.channel import Channel, RankCall
from learner.world.rank import Rank

log = structlog.get_logger()
BEAT_S = 1.0
P = ParamSpec("P")
T = TypeVar("T")
LEAVE = RankCall(None)


class World:
    """All ranks: rank 0 calls methods of `Rank` through `call`, and the others `follow`."""

    def __init__(self, channel: Channel, rank: Rank, settings: LearnerSettings) -> None:
        self.rank = rank
        self._channel = channel
        self._settings = settings
        self._calling = False
        """Whether a call has not returned on this rank: while it runs, and for good after it failed."""

    @property
    def takes_calls(self) -> bool:
        """Return whether all ranks are done with what they were called for. After a call that failed on one
        rank the others may wait for it in a collective, and would take the next for that one."""
        return not self._calling or dist.get_world_size() == 1

    @asynccontextmanager
    async def led(self, stop: asyncio.Event) -> AsyncIterator[None]:
        """Keep the other ranks listening inside, and let them go at the end. Sets `stop` when any of them was
        told to stop. Raises `WorldError` when one is gone."""
        async with asyncio.TaskGroup() as tasks:
            beating = tasks.create_task(self._beat(stop), name="heartbeat of the world")
            yield
            beating.cancel()
            with suppress(asyncio.CancelledError):
                await beating
            self.rank.cancel_fetches()
            await self._channel.send(LEAVE)

    async def call(
        self, method: Callable[Concatenate[Any, P], Awaitable[T]], *arguments: P.args, **named: P.kwargs
    ) -> T:
        """Call a coroutine of `Rank` on all ranks, by its name; return what it returns on this one, rank 0.

        Every one can be called so, if its arguments can be pickled: there is no list of them. Raises
        `WorldError` when a rank is gone."""
        self._calling = True
        await self._channel.send(RankCall(method.__name__, arguments, named))
        result = await method(self.rank, *arguments, **named)
        self._calling = False
        return result

    async def send(
        self, method: Callable[Concatenate[Any, P], None], *arguments: P.args, **named: P.kwargs
    ) -> None:
        """Call a plain method of `Rank` on all ranks, by its name; each does it on receipt."""
        await self._channel.send(RankCall(method.__name__, arguments, named))
        method(self.rank, *arguments, **named)

    async def fetch(self, lease: BatchLease) -> None:
        """Divide the groups of a step; return when this rank's are here, while the others fetch theirs."""
        shares = divided(lease.groups, self.rank.shares, self._cost)
        await self.send(Rank.fetch, lease.step, shares, lease.given_to)
        await self.rank.fetched(lease.step)

    def forward_flops(self, lease: BatchLease) -> float:
        """Return the FLOPs of one forward pass over the groups of a step, on all ranks together."""
        batch, samples = self._settings.learner.batch, self._settings.samples_per_prompt
        return sum(
            work_of(group, batch, samples).forward_flops(self.rank.hf_config)
            for group in lease.groups
            if group.tokens
        )

    async def follow(self) -> None:
        """Do what rank 0 calls until it ends the world; any other rank calls this. Raises `WorldError` when
        rank 0 is gone."""
        calls: asyncio.Queue[RankCall] = asyncio.Queue()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen(calls), name="hear calls")
            while (call := await calls.get()) != LEAVE:
                await self._method(call)(*call.arguments, **call.named)
            self.rank.cancel_fetches()

    async def _listen(self, calls: asyncio.Queue[RankCall]) -> None:
        """Call a plain method, such as `fetch`, at once, even during a step; a coroutine waits its turn."""
        call: RankCall | None = None
        while call != LEAVE:
            call = await self._channel.receive()
            if call is None:
                continue
            if call == LEAVE or inspect.iscoroutinefunction(self._method(call)):
                calls.put_nowait(call)
            else:
                self._method(call)(*call.arguments, **call.named)

    def _method(self, call: RankCall) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self.rank, str(call.method))
        return method

    def _cost(self, group: GroupRef) -> float:
        """Return what a group costs a rank; storage that does not count tokens takes all groups for equal."""
        batch, samples = self._settings.learner.batch, self._settings.samples_per_prompt
        return cost(group, batch, self.rank.hf_config, samples)

    async def _beat(self, stop: asyncio.Event) -> None:
        while True:
            if await self._channel.send() and not stop.is_set():
                log.info("world_stops", why="one of its ranks was told to")
                stop.set()
            await asyncio.sleep(BEAT_S)


def cost(group: GroupRef, batch: BatchConfig, config: PretrainedConfig, samples: int) -> float:
    """Return what a group of so many samples costs a rank, in the measure of `batch.balance`."""
    work = work_of(group, batch, samples)
    if batch.balance == "flops" and group.tokens:
        return work.forward_flops(config)
    return max(1.0, work.computed_tokens)


def work_of(group: GroupRef, batch: BatchConfig, samples: int) -> GroupWork:
    """Return what a rank computes of a group of so many samples."""
    computed = group.computed_tokens if batch.share_prefixes else 0
    return GroupWork.of(samples, group.tokens, computed, batch.token_budget, group.images)


def divided(
    groups: Sequence[GroupRef], parts: int, cost: Callable[[GroupRef], float]
) -> tuple[tuple[GroupRef, ...], ...]:
    """Whole groups for each of `parts`: an advantage needs all siblings, so they stay together."""
    shares = balanced([cost(group) for group in groups], parts)
    return tuple(tuple(groups[n] for n in share) for share in shares)
