"""The group in which the learner sends weights to one SGLang server (`update_weights_from_distributed`)."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import structlog

from actors.engines.announced_version import OFFER_S, Published
from actors.engines.sglang.client.client import SHORT_S, SglangClient, TooSlowError, UnreachableError
from actors.engines.sglang.client.server_facts import ServerFacts
from actors.engines.sglang.in_server.sluice_digests import EXPECT
from bus.errors import BusError, ConfigError, EngineError
from bus.waiting import left_s
from bus.weight_requests import OfferedBucket

log = structlog.get_logger()
AGAIN_S = 60.0
"""After a group failed, weights come the other way for so long."""
Offer = Sequence[OfferedBucket]


class LearnerGroup:
    """A server's membership: joined when it is needed, kept from version to version, left when it fails. A
    group that failed is not used again: the next one has another name."""

    def __init__(self, client: SglangClient, facts: ServerFacts) -> None:
        self._client = client
        self._facts = facts
        self._checks = all(EXPECT in (server.get("custom_weight_loader") or ()) for server in facts.settings)
        self.name = ""
        """Name of the group that the server is in, or was to join; empty for none."""
        self._first_rank = 1
        self._not_before_s = 0.0

    def refuse_unreachable(self) -> None:
        """Raise `ConfigError` for a server that SGLang does not send weights to in this way."""
        if self._facts.replicas > 1:
            raise ConfigError(
                'actors.engine.update="group" reaches one tensor-parallel group, and this server has '
                f"{self._facts.replicas} (dp_size times pp_size): start an engine for each, or use another"
            )

    async def prepare(self, published: Published, timeout_s: float) -> Offer:
        """Get an offer and be in its group, while the server generates; nothing if the learner cannot, or the
        server cannot check what a signed offer says."""
        end_s = time.monotonic() + timeout_s
        if time.monotonic() < self._not_before_s:
            return ()
        if published.are_signed and not self._checks:
            remedy = f"start the server with the custom weight loader {EXPECT}, or use another update"
            log.warning("weights_not_asked_for", policy_version=published.policy_version, remedy=remedy)
            return ()
        try:
            offer = await published.offered(
                self.name,
                ranks=self._facts.tensor_ranks,
                device=self._facts.device,
                timeout_s=min(OFFER_S, timeout_s),
                first_rank=self._first_rank,
            )
        except BusError as error:
            log.warning("weights_not_offered", policy_version=published.policy_version, reason=str(error))
            return ()
        if offer[0].group == self.name:
            return offer
        await self._forget()
        self.name, self._first_rank = offer[0].group, offer[0].first_rank
        try:
            async with published.in_group(offer):
                await self._client.join_group(offer[0], left_s(end_s))
        except EngineError as error:
            await self.leave(published, str(error))
            return ()
        log.info("sglang_joined_learner", group=self.name, backend=offer[0].backend)
        return offer

    async def receive(self, offer: Offer, published: Published, *, flush: bool, end_s: float) -> None:
        """Take what was offered by `end_s` of the monotonic clock, while the server stands still.

        The last bucket sets the version.

        Raises `EngineError` or `BusError` when not all of it came: the server's weights are then of no
        version."""
        client = self._client
        updating = client.updating(self._facts, left_s(end_s))
        async with published.in_group(offer), updating, self._checking(offer, end_s):
            await published.begin(offer)  # in here: a refusal to update would leave the learner waiting
            for bucket in offer:
                last = bucket is offer[-1]
                await client.receive(bucket, self._facts, last=last, flush=flush, timeout_s=left_s(end_s))
            await self._sent(offer, published, end_s)  # with CUDA the server answers before it has them

    @asynccontextmanager
    async def _checking(self, offer: Offer, end_s: float) -> AsyncIterator[None]:
        """Inside, the server takes what has the digests of the offer, if it has any, and nothing else."""
        if not offer[0].digests:
            yield
            return
        await self._client.expect(offer, self._facts, left_s(end_s))
        try:
            yield
        except (UnreachableError, TooSlowError):  # the server is given up
            raise
        except (EngineError, BusError):
            with suppress(EngineError):  # what failed is raised
                await self._client.expect((), self._facts, SHORT_S)
            raise

    async def _sent(self, offer: Offer, published: Published, end_s: float) -> None:
        """Return when the learner has sent all. Raises as `receive` does."""
        try:
            await published.ended(offer, left_s(end_s))
        except BusError as error:
            if time.monotonic() < end_s:
                raise
            raise TooSlowError(f"the learner has not sent all that the server waits for: {error}") from error

    async def leave(self, published: Published, reason: str) -> None:
        """The group failed: have nothing more to do with it, and with any for a while."""
        log.warning("learners_group_failed", group=self.name, reason=reason)
        self._not_before_s = time.monotonic() + AGAIN_S
        await self.end(published)

    async def end(self, published: Published) -> None:
        if self.name:
            await published.leave(self.name)
            await self._forget()

    async def _forget(self) -> None:
        if self.name:
            with suppress(EngineError):  # the server may not be in the group, or be gone
                await self._client.leave_group(self.name)
            self.name = ""
