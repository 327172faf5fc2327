"""A version that the learner announced, for engines that it can send the weights to itself."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal

import nats.errors
import structlog

from bus.codec import decode
from bus.connection import Bus
from bus.errors import BusError, SchemaError
from bus.messages import PolicyManifest
from bus.requests import Done
from bus.waiting import cancelled
from bus.weight_requests import (
    GROUP_BEAT_S,
    BroadcastBegin,
    BroadcastEnd,
    BroadcastWanted,
    GroupBeat,
    GroupLeft,
    OfferedBucket,
    SignedOffer,
    WeightOffer,
)

if TYPE_CHECKING:
    import torch

log = structlog.get_logger()
OFFER_S = 180.0
"""The learner starts a process and copies its weights first."""
BEGIN_S = 10.0


class Published:
    """Says where the weights of a version come from: the learner's broadcast, else the transport."""

    def __init__(
        self,
        bus: Bus,
        manifest: PolicyManifest,
        fetch: Callable[[PolicyManifest], Awaitable[Mapping[str, "torch.Tensor"]]],
        *,
        actor: str = "",
    ) -> None:
        """`fetch` brings all tensors by the transport; `actor` is the name of this process."""
        self.policy_version = manifest.policy_version
        self.incarnation = manifest.incarnation
        self._bus = bus
        self.manifest = manifest
        self._fetch = fetch
        self._actor = actor
        self._tensors: Mapping[str, torch.Tensor] | None = None
        self._fetching = asyncio.Lock()

    @property
    def are_signed(self) -> bool:
        return self._bus.secured

    async def offered(
        self, group: str, *, ranks: int, device: Literal["cpu", "cuda"], timeout_s: float = OFFER_S,
        first_rank: int = 1,
    ) -> Sequence[OfferedBucket]:  # fmt: skip
        """Ask the learner for a broadcast of this version or a later one, in `group` if it still has that.
        Raises `BusError` when it is not there or cannot, and for an offer that it has not made for this."""
        wanted = BroadcastWanted(
            incarnation=self.incarnation,
            policy_version=self.policy_version,
            group=group,
            ranks=ranks,
            device=device,
            nonce=secrets.token_hex(16),
            first_rank=first_rank,
            actor=self._actor,
        )
        subject = self._bus.subject("broadcast", "wanted")
        answers = await self._bus.request_many(subject, wanted, SignedOffer, timeout_s=timeout_s)
        if not answers:
            raise BusError(f"{subject}: the learner offers no tensors")
        try:
            data = await self._bus.opened(self._bus.subject("broadcast", "offer"), answers[0].record)
            offer = await asyncio.to_thread(decode, data, WeightOffer)
        except SchemaError as error:
            raise BusError(f"the offer of version {self.policy_version} is not taken: {error}") from error
        if offer.nonce != wanted.nonce or not offer.buckets:
            raise BusError(f"the offer of version {self.policy_version} is not one for this request")
        return offer.buckets

    @asynccontextmanager
    async def in_group(self, offer: Sequence[OfferedBucket]) -> AsyncIterator[None]:
        """Let the learner know, inside, that this actor lives: the other engines of the group wait for this
        one, and no longer than the learner hears of it."""
        beating = asyncio.create_task(self._beat(offer[0]), name=f"beats of {offer[0].group}")
        try:
            yield
        finally:
            await cancelled(beating)

    async def _beat(self, offered: OfferedBucket) -> None:
        beat = GroupBeat(group=offered.group, first_rank=offered.first_rank)
        while True:
            await self._bus.notify(self._bus.subject("broadcast", "beat"), beat)
            await asyncio.sleep(GROUP_BEAT_S)

    async def begin(self, offer: Sequence[OfferedBucket]) -> None:
        """Have the learner send what it offered; return when all engines of the group are ready. Raises
        `BusError` when one of them is not in time."""
        begin = BroadcastBegin(
            group=offer[0].group, first_rank=offer[0].first_rank, policy_version=offer[0].policy_version
        )
        await self._bus.request(self._bus.subject("broadcast", "begin"), begin, Done, timeout_s=BEGIN_S)

    async def ended(self, offer: Sequence[OfferedBucket], timeout_s: float) -> None:
        """Return when all of what was offered is sent. Raises `BusError` when it is not, or not in time."""
        end = BroadcastEnd(group=offer[0].group, policy_version=offer[0].policy_version)
        await self._bus.request(self._bus.subject("broadcast", "end"), end, Done, timeout_s=timeout_s)

    async def leave(self, group: str) -> None:
        """Tell the learner that nobody waits in `group` any more."""
        try:
            await self._bus.notify(self._bus.subject("broadcast", "left"), GroupLeft(group=group))
        except nats.errors.Error as error:  # the learner gives it up by itself
            log.warning("group_not_left", group=group, reason=str(error))

    async def tensors(self) -> Mapping[str, "torch.Tensor"]:
        """Return all tensors by Hugging Face name, fetched once for all engines that the learner could not
        serve. Raises `BusError` or `StorageError`."""
        async with self._fetching:
            if self._tensors is None:
                self._tensors = await self._fetch(self.manifest)
            return self._tensors
