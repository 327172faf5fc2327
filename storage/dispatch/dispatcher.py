"""Issues prompt leases within the staleness bound and gives complete groups to optimizer steps."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import structlog

from bus.codec import Message
from bus.connection import Bus
from bus.errors import BusError, ConfigError, FencedError, LostDataError, NoActorsError
from bus.images import ImageCount
from bus.messages import GroupRejected, PolicyManifest, RoleHolder
from bus.requests import (
    BatchLease,
    BatchRequest,
    Done,
    GroupRef,
    GroupsUnreadable,
    IssuedRequest,
    LearnerResumed,
    LeaseRequest,
    StepCommitted,
    StepGroups,
    StepGroupsRequest,
    StoredGroups,
    StoredRequest,
    Unsettled,
    UnsettledRequest,
    Waiting,
)
from bus.streams.consume import Inbox, consume_batches
from bus.topology import by_shard, shard_of
from bus.waiting import set_within
from storage.dispatch.absent_actors import AbsentActors
from storage.dispatch.admission import Admission
from storage.dispatch.engine_queues import EngineQueues
from storage.dispatch.lease_status import LeaseStatus
from storage.dispatch.leases import LeasePublication, LostLeases
from storage.ledger.given_groups import Use
from storage.ledger.ledger import Ledger
from storage.prompts.curriculum import SourceSuccess
from storage.prompts.data_sets import DataSets
from storage.prompts.supply import Supply
from storage.settings.admission import AdmissionConfig, PrioritySampler
from storage.shard.group_requests import close_short
from storage.shard.ingest_checks import LedgerFacts
from storage.store.settled import Settled, refuse_older_ledger

log = structlog.get_logger()
POLL_S = 1.0
LONG_POLL_S = 2.0
"""A batch request that cannot be served yet is held for so long before it is answered with the reason."""


class Counting(NamedTuple):
    """Says what shards count of each group besides its tokens, which takes reading it."""

    computed_tokens: bool = False
    """Whether what several trajectories begin with counts once: the learner computes it once."""
    images: bool = False
    """Whether images are counted: the learner's balance of ranks is by work."""


TOKENS = Counting()


class Dispatcher:
    """The one process of a run that decides what is rolled out and what is trained on.

    `Admission` decides; this carries it out on the bus, and makes each decision durable before it is heard.
    """

    def __init__(
        self, bus: Bus, ledger: Ledger, data: DataSets, admission: AdmissionConfig, *,
        shards: int, seed: int, supply: Supply | None = None,
        counting: Counting = TOKENS,
    ) -> None:  # fmt: skip
        """Decide on the ledger's leases.

        `supply` decides which prompts come next: without it, the data sets do. `counting` is what shards
        count of each group."""
        self.ledger = ledger
        self.facts = LedgerFacts(ledger, self.look_at_policy)
        self._data = data
        self._supply = supply or SourceSuccess(ledger, data)
        self._admission = Admission(
            ledger, admission,
            seed=seed, is_quarantined=data.is_quarantined, on_outcome=self._supply.note,
            prompts_left=lambda: self._supply.left,
        )  # fmt: skip
        self._lease_status = LeaseStatus(
            ledger, self._admission, data, max_deliver=admission.max_deliver, on_refund=self._wake
        )
        self._wants_spreads = isinstance(admission.sampler, PrioritySampler)
        self._counting = counting
        self._bus = bus
        self._publication = LeasePublication(bus, self.facts, data, samples=admission.samples_per_prompt)
        self._shards = shards
        self._lost = LostLeases(bus, shards)
        self._heard: set[int] = set()
        """Shards all of whose groups the ledger has seen."""
        self.silent_shards: set[int] = set()
        """Shards that did not answer when they were asked last."""
        self.absent_actors = AbsentActors(ledger)
        """Knows whether actors are there, and why the last ones ended."""
        self.engine_queues = EngineQueues()
        """Knows how many requests wait for room in an engine."""
        self._samples = admission.samples_per_prompt
        self._changed = asyncio.Event()
        self._news = asyncio.Event()
        """Set, and replaced, whenever a batch that could not be formed may have become possible."""
        self.serving = False
        """Whether the dispatcher answers requests."""
        self._ended = False
        """Whoever still waits for a batch is to ask the next dispatcher."""

    @property
    def policy(self) -> PolicyManifest | None:
        return self._admission.policy

    def admit(self) -> None:
        """Issue leases from now on: the prompts are known to fit the model."""
        self._admission.opened = True
        self._changed.set()

    @property
    def waiting(self) -> int:
        """Return how many groups no actor has begun, as far as is known."""
        return self._admission.waiting

    def note_waiting(self, leases: int) -> None:
        """Take note of how many leases no actor has taken. Groups whose requests wait for an engine have not
        begun either."""
        self._admission.waiting = leases + int(self.engine_queues.requests // self._samples)

    def room(self) -> int:
        """Return the number of leases that may be issued now."""
        return self._admission.room()

    @property
    def held_back(self) -> str:
        """Return why fewer leases are issued than the staleness bound allows; nothing if they are not."""
        return self._admission.held_back

    @property
    def waits_for_prompts(self) -> str:
        """Return whose prompts are waited for, in words; empty where none are."""
        return self._supply.waits_for

    @property
    def awaited_shards(self) -> list[int]:
        """Shards that have not said yet what they hold; no lease is issued before all have."""
        return [shard for shard in range(self._shards) if shard not in self._heard]

    async def run(self, stop: asyncio.Event, *, reissue: bool) -> None:
        """Serve until `stop`. `reissue` publishes again what is rolling out, for a bus that lost it."""
        await self._publication.publish_unpublished(everything=reissue)
        serving = [
            await self._bus.serve(self._bus.subject("rpc", "batch"), BatchRequest, self._on_batch),
            await self._bus.serve(self._bus.subject("rpc", "step_groups"), StepGroupsRequest, self._on_given),
            await self._bus.serve(self._bus.subject("rpc", "committed"), StepCommitted, self._on_committed),
            await self._bus.serve(
                self._bus.subject("rpc", "unreadable"), GroupsUnreadable, self._on_unreadable
            ),
            await self._bus.serve(self._bus.subject("rpc", "resumed"), LearnerResumed, self._on_resumed),
            await self._bus.serve(self._bus.subject("rpc", "issued"), IssuedRequest, self._on_issued),
            await self._bus.serve(
                self._bus.subject("rpc", "unsettled"), UnsettledRequest, self._on_unsettled
            ),
            await self._bus.serve(self._bus.subject("rpc", "lease"), LeaseRequest, self._lease_status.answer),
            await self._bus.listen(self._bus.subject("notice", "policy"), PolicyManifest, self._on_policy),
            await self._bus.listen(self._bus.subject("notice", "stored"), StoredGroups, self._on_notice),
        ]
        self.serving = True
        rejected = Inbox(self._bus, "OUTCOMES", "dispatcher")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._admit(stop), name="admit leases")
            tasks.create_task(self._poll(stop), name="poll policy and shards")
            tasks.create_task(
                consume_batches(rejected, self._bus, GroupRejected, self._on_rejected, stop=stop, limit=64),
                name="refund rejected groups",
            )
        self.serving = False
        for subscription in serving:
            await subscription.unsubscribe()
        self._ended = True
        self._wake()  # a request without an answer would wait for one for long
        await asyncio.to_thread(self.ledger.flush)

    # --- admission ---

    async def _admit(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            self._changed.clear()
            self._data.refuse_exhausted()
            if not self.awaited_shards and (room := self._admission.room()):
                await self._supply.extend(room, stop)
                if leases := self._admission.issue():
                    await asyncio.to_thread(self.ledger.flush)
                    await self._publication.publish(leases)
                    self._changed.set()  # prompts of some may be lacking still
            await set_within(self._changed, POLL_S)

    # --- what happened elsewhere ---

    async def _poll(self, stop: asyncio.Event) -> None:
        """Notices can be lost; the keys and the shards' own lists cannot. A full disk is noticed here."""
        while not stop.is_set():
            await self.look_at_policy()
            through = self._publication.through
            gone = await self._lost.look([n for n in self.ledger.rolling_out if n <= through])
            if all(await asyncio.gather(*map(self._catch_up, range(self._shards)))):
                await self._publish_lost(gone)
            await asyncio.to_thread(self.ledger.flush)
            await set_within(stop, POLL_S / 4 if self.awaited_shards else POLL_S)

    async def look_at_policy(self) -> None:
        """Hear of the newest published version, should its notice have been lost."""
        before = self.policy
        try:
            found = await self._bus.get("policy", PolicyManifest)
        except BusError as error:  # the bus is away: what is known stays true meanwhile
            log.warning("policy_not_read", reason=str(error))
            return
        if found is not None and self.policy is before:  # else a notice overtook the answer
            self._on_policy(found[0])

    async def _publish_lost(self, lease_ids: Sequence[int]) -> None:
        """Publish anew the given leases that no shard has in full."""
        rolling_out = self.ledger.rolling_out
        left = [lease_id for lease_id in lease_ids if lease_id in rolling_out]
        not_whole = await self._lost.not_whole(left)
        if lost := [rolling_out[n] for n in not_whole if n in rolling_out]:
            await self._publication.publish_lost(lost)

    async def _catch_up(self, shard: int) -> bool:
        out = () if shard in self._heard else tuple(self._rolling_out_of(shard))
        request = StoredRequest(
            after=self._admission.seen(shard),
            spreads=self._wants_spreads,
            rewards=self._supply.wants_rewards,
            computed_tokens=self._counting.computed_tokens,
            images=self._counting.images,
            rolling_out=out,
        )
        try:
            news = await self._bus.request(
                self._bus.subject("rpc", "stored", shard), request, StoredGroups, timeout_s=POLL_S
            )
        except BusError as error:
            log.debug("shard_does_not_answer", shard=shard, reason=str(error))
            self.silent_shards.add(shard)
            return False
        self.silent_shards.discard(shard)
        if news.total < request.after:
            raise LostDataError(
                f"shard {shard} holds {news.total} complete groups, but the ledger has seen {request.after}: "
                "restore the replay directory"
            )
        refuse_older_ledger(
            self.ledger.name,
            news.directory,
            Settled(through=news.settled_through, forgotten=news.forgotten),
            issued=self.ledger.next_id,
            seen=self._admission.seen(shard),
            again=[n for n in news.settled if n in self.ledger.rolling_out],  # some may have ended meanwhile
        )
        self._refuse_other_run(news)
        self._on_stored(news)
        if shard not in self._heard and news.after + len(news.lease_ids) == news.total:
            self._heard.add(shard)
            self._changed.set()
        return True

    def _rolling_out_of(self, shard: int) -> list[int]:
        return [n for n in self.ledger.rolling_out if shard_of(n, self._shards) == shard]

    def _refuse_other_run(self, news: StoredGroups) -> None:
        """Groups of a lease that is yet to be issued would stand in the way of its own."""
        youngest = max(news.lease_ids, default=-1)
        if youngest >= self.ledger.next_id:
            raise ConfigError(
                f"shard {news.shard} holds the group of lease {youngest}, but the ledger has issued only "
                f"{self.ledger.next_id}: restore the ledger, or move both away to start a new run"
            )

    def _on_policy(self, manifest: PolicyManifest) -> None:
        if self._admission.on_policy(manifest):
            self._changed.set()

    def _on_notice(self, news: StoredGroups) -> None:
        known = news.shard in self._heard and news.after == self._admission.seen(news.shard)
        if known and not (self._wants_spreads or self._supply.wants_rewards or any(self._counting)):
            self._on_stored(news)  # else news was missed or lacks what a poll asks: that brings all

    def _on_stored(self, news: StoredGroups) -> None:
        if self._admission.on_stored(news):
            self._wake()

    async def _on_rejected(self, rejections: list[GroupRejected]) -> None:
        self._admission.on_rejected(rejections)
        await asyncio.to_thread(self.ledger.flush)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._news.set()
        self._news = asyncio.Event()

    # --- the learner's requests ---

    async def _on_batch(self, request: BatchRequest) -> list[Message]:
        loop = asyncio.get_running_loop()
        deadline, look = loop.time() + LONG_POLL_S, True
        while not self._ended:
            self._admission.refuse_fenced(request.incarnation)  # each time: another may have come meanwhile
            news = self._news
            if look or loop.time() >= deadline:
                answer = await self._choose(request)
                if isinstance(answer, BatchLease) or loop.time() >= deadline:
                    return [answer]
            await set_within(news, max(0.0, deadline - loop.time()))
            look = self._admission.enough_stored()  # news come with every group, and a look costs a sort
        return [Waiting(reason="storage has ended")]

    async def _choose(self, request: BatchRequest) -> BatchLease | Waiting:
        now_s = asyncio.get_running_loop().time()
        rejected = self.ledger.account().rejected
        groups = self._admission.batch(request.step, request.policy_version, now_s=now_s)
        if self._admission.to_close:
            await self._close_short(sorted(self._admission.to_close))
        if self.ledger.account().rejected > rejected:
            self._changed.set()
        if isinstance(groups, str):
            if failure := self.absent_actors.failure:
                raise NoActorsError(failure)
            return Waiting(reason=groups, alarm=self.absent_actors.alarm)
        await asyncio.to_thread(self.ledger.flush)  # also if another request chose them a moment ago
        refs = self._refs(groups)
        return BatchLease(step=request.step, groups=refs, given_to=request.incarnation)

    def _refs(self, groups: Sequence[Use]) -> tuple[GroupRef, ...]:
        return tuple(
            GroupRef(
                lease_id=use.lease_id,
                shard=shard_of(use.lease_id, self._shards),
                weight=use.weight,
                tokens=use.group.tokens,
                computed_tokens=use.group.computed_tokens,
                images=ImageCount(use.group.images, use.group.image_tokens),
            )
            for use in groups
        )

    async def _on_given(self, request: StepGroupsRequest) -> list[Message]:
        given = self.ledger.uses(request.step)  # in this thread, which alone changes what the ledger holds
        policy = self.policy
        answer = StepGroups(
            step=request.step,
            groups=self._refs(given),
            incarnation=self.ledger.facts.get("incarnation", ""),
            trained_through=-1 if policy is None else policy.policy_version - policy.trains_from,
            trains_from=0 if policy is None else policy.trains_from,
            stage="" if policy is None else policy.stage,
        )
        await asyncio.to_thread(self.ledger.flush)  # a crash must not undo what somebody has heard
        return [answer]

    async def _close_short(self, lease_ids: list[int]) -> None:
        complete, few = await close_short(self._bus, lease_ids, self._shards)
        self._admission.on_closed(complete, few)
        for shard in by_shard(complete, self._shards):
            await self._catch_up(shard)

    async def _on_committed(self, request: StepCommitted) -> list[Message]:
        self._admission.commit(request.step, request.incarnation)
        await asyncio.to_thread(self.ledger.flush)
        return [Done()]

    async def _on_unreadable(self, report: GroupsUnreadable) -> list[Message]:
        damaged = self._admission.on_unreadable(report.step, report.lease_ids, report.incarnation)
        await asyncio.to_thread(self.ledger.flush)
        if damaged:  # else the damage was reported before
            log.error("groups_damaged", step=report.step, leases=damaged, reason=report.reason)
            self._wake()
        return [Done()]

    async def _on_resumed(self, request: LearnerResumed) -> list[Message]:
        await self._refuse_usurper(request.incarnation)
        await self.look_at_policy()  # the last version of the learner before: tokens of it are still to come
        self.absent_actors.give_time()
        groups = self._admission.resume(request.step, request.incarnation)
        await asyncio.to_thread(self.ledger.flush)
        log.info("learner_resumed", step=request.step, groups_rolled_back=groups)
        self._wake()
        return [Done()]

    async def _on_issued(self, request: IssuedRequest) -> list[Message]:
        """A shard elsewhere stores no group of a lease that was never issued, and has a quarantine too."""
        await self.look_at_policy()
        known = self.facts.issued(request.shard, self._shards, self._admission.seen(request.shard))
        await asyncio.to_thread(self.ledger.flush)  # or a crash could issue the same numbers again
        return [known]

    async def _on_unsettled(self, request: UnsettledRequest) -> list[Message]:
        """Return what a shard must keep: a step may still be given it, or a resumed learner trains on it
        again."""
        needed = self._admission.unsettled()
        answer = Unsettled(
            lease_ids=tuple(needed), next_id=self.ledger.next_id, seen=self._admission.seen(request.shard)
        )
        await asyncio.to_thread(self.ledger.flush)  # a lease that was not found stays so across a crash
        return [answer]

    async def _refuse_usurper(self, incarnation: str) -> None:
        """A learner that was suspended while another took its role over must not take the run back."""
        found = await self._bus.get_settled("role.learner", RoleHolder)
        if found is not None and found[0].incarnation != incarnation:
            raise FencedError(f"learner {incarnation} was replaced by {found[0].incarnation}")
