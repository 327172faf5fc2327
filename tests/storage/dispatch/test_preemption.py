"""Actors that are killed without notice: what that does to sound prompts, and to one that kills.

The ledger, the admission and the lease status are the real ones; actors and the queue are simulated here.
"""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from heapq import heappop, heappush
from itertools import count
from pathlib import Path

import pytest

from bus.messages import Prompt
from bus.requests import LeaseRequest, LeaseState
from storage.dispatch.admission import Admission
from storage.dispatch.lease_status import FREE_DELIVERIES, IN_COMPANY, LeaseStatus, is_suspect
from storage.ledger.ledger import Ledger
from storage.prompts.data_sets import DataSets
from storage.settings.admission import AdmissionConfig
from tests.storage.ledger.ledgers import on_disk
from tests.storage.serving import manifest

GROUPS = 300
CONFIG = AdmissionConfig(groups_per_step=GROUPS, samples_per_prompt=2, max_staleness=0)
MOST_DEATHS = FREE_DELIVERIES + IN_COMPANY + CONFIG.max_deliver
POISON = 7
POISON_KILLS_AFTER = 0.1


class Actor:
    """The leases that one process holds; the process that replaces it is another actor."""

    def __init__(self) -> None:
        self.running: set[int] = set()
        self.suspects: list[int] = []
        """Suspects that it holds, of which only the first runs."""
        self.is_dead = False


class Fleet:
    """Actors that roll out 300 leases on a clock of their own, and die at random."""

    def __init__(self, directory: Path, ledger: Ledger, *, seed: int, lifetime: float, poison: int) -> None:
        """Let actors live for `lifetime` on average, in units of the median rollout; -1 is no poison."""
        self.ledger = ledger
        self.data = DataSets(ledger, directory)
        prompts = [Prompt(content=f"prompt {n}") for n in range(GROUPS)]
        self.data.configure(prompts, seed=0, shuffle=False, source="the test")
        admission = Admission(ledger, CONFIG, seed=0, is_quarantined=self.data.is_quarantined)
        admission.opened = True
        admission.on_policy(manifest(0))
        self.status = LeaseStatus(
            ledger, admission, self.data, max_deliver=CONFIG.max_deliver, on_refund=lambda: None
        )
        self.queue = admission.issue()
        self.deliveries: Counter[int] = Counter()
        self.deaths: Counter[int] = Counter()
        """Actors that disappeared while they ran each lease."""
        self.finished: list[int] = []
        self._random = random.Random(seed)
        self.lengths = {n: self._random.lognormvariate(0.0, 0.7) for n in self.queue}
        self._lifetime = lifetime
        self._poison = poison
        self._events: list[tuple[float, int, Actor, int]] = []
        """What happens when, and to which actor: a lease ends, or with -1 the actor is killed."""
        self._order = count()
        self._now = 0.0

    async def run(self, *, actors: int, leases_each: int) -> None:
        """Go on until every lease is settled."""
        fleet = [self._new_actor() for _ in range(actors)]
        for actor in fleet:
            await self._take(actor, leases_each)
        while self.ledger.rolling_out:
            self._now, _, actor, lease = heappop(self._events)
            if actor.is_dead:
                continue
            if lease in (-1, self._poison):
                self._kill(actor)
                fleet[fleet.index(actor)] = self._new_actor()
            else:
                await self._finish(actor, lease)
            for other in fleet:
                await self._take(other, leases_each)

    def _new_actor(self) -> Actor:
        actor = Actor()
        self._add(self._random.expovariate(1 / self._lifetime), actor, -1)
        return actor

    def _add(self, after: float, actor: Actor, lease: int) -> None:
        heappush(self._events, (self._now + after, next(self._order), actor, lease))

    async def _take(self, actor: Actor, most: int) -> None:
        """Take leases as `Worker` does, until the actor has `most`."""
        while self.queue and len(actor.running.union(actor.suspects)) < most:
            lease = self.queue.pop(0)
            self.deliveries[lease] += 1
            if self.deliveries[lease] <= FREE_DELIVERIES:
                self._begin(actor, lease)
            elif not is_suspect((await self._ask(lease)).attempts):
                await self._attempt(actor, lease)
            else:
                actor.suspects.append(lease)
                await self._attempt_suspect(actor)

    async def _attempt_suspect(self, actor: Actor) -> None:
        while actor.suspects and actor.suspects[0] not in actor.running:
            await self._attempt(actor, actor.suspects[0])
            if actor.suspects[0] not in actor.running:  # it is quarantined now
                del actor.suspects[0]

    async def _attempt(self, actor: Actor, lease: int) -> None:
        if (await self._ask(lease, attempt=True)).state == "open":
            self._begin(actor, lease)

    def _begin(self, actor: Actor, lease: int) -> None:
        actor.running.add(lease)
        self._add(POISON_KILLS_AFTER if lease == self._poison else self.lengths[lease], actor, lease)

    async def _finish(self, actor: Actor, lease: int) -> None:
        self.ledger.store(lease, 0.0, 0)
        self.finished.append(lease)
        actor.running.remove(lease)
        if lease in actor.suspects:
            actor.suspects.remove(lease)
            await self._attempt_suspect(actor)

    def _kill(self, actor: Actor) -> None:
        actor.is_dead = True
        self.deaths.update(actor.running)
        self.queue += sorted(actor.running.union(actor.suspects))

    async def _ask(self, lease: int, *, attempt: bool = False) -> LeaseState:
        [state] = await self.status.answer(LeaseRequest(lease_id=lease, attempt=attempt))
        assert isinstance(state, LeaseState)
        return state


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with closing(Ledger.open(tmp_path / "ledger.sqlite")) as opened:
        yield opened


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize("seed", range(4))
async def test_killed_actors_quarantine_no_sound_prompt_and_bias_no_length(ledger, tmp_path, seed):
    """An actor lives for six median rollouts. Each kill cuts eight short, the long ones most often."""
    from scipy.stats import ks_2samp  # takes a quarter of a second to import, and only this needs it

    fleet = Fleet(tmp_path, ledger, seed=seed, lifetime=6.0, poison=-1)
    await fleet.run(actors=4, leases_each=8)
    assert sum(fleet.deaths.values()) > 30
    assert not fleet.data.quarantined
    assert sorted(fleet.finished) == sorted(fleet.lengths)
    submitted, finished = list(fleet.lengths.values()), [fleet.lengths[n] for n in fleet.finished]
    assert ks_2samp(submitted, finished).pvalue > 0.01


@pytest.mark.first(2, others=pytest.mark.slow)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lifetime", [10.0, 1e9])
async def test_a_poisonous_prompt_alone_is_quarantined_after_a_bounded_number_of_deaths(
    ledger, tmp_path, lifetime, seed
):
    fleet = Fleet(tmp_path, ledger, seed=seed, lifetime=lifetime, poison=POISON)
    await fleet.run(actors=4, leases_each=8)
    assert fleet.data.quarantined == 1
    assert fleet.data.is_quarantined(POISON)
    assert fleet.deaths[POISON] <= MOST_DEATHS
    assert sorted(fleet.finished) == [n for n in range(GROUPS) if n != POISON]


@pytest.mark.slow
async def test_six_kills_of_all_actors_quarantine_nothing(ledger, tmp_path):
    """Every lease is in flight each time: the worst that restarts every ten minutes do in an hour."""
    fleet = Fleet(tmp_path, ledger, seed=0, lifetime=1e9, poison=-1)
    for _ in range(6):
        for lease in list(fleet.queue):
            fleet.deliveries[lease] += 1
            if fleet.deliveries[lease] > FREE_DELIVERIES:
                await fleet.status.answer(LeaseRequest(lease_id=lease, attempt=True))
    await fleet.run(actors=4, leases_each=8)
    assert not fleet.data.quarantined
    assert len(fleet.finished) == GROUPS


async def test_an_attempt_is_on_the_disk_before_it_begins(ledger, tmp_path):
    fleet = Fleet(tmp_path, ledger, seed=0, lifetime=1e9, poison=-1)
    ledger.flush()
    [state] = await fleet.status.answer(LeaseRequest(lease_id=fleet.queue[0], attempt=True))
    assert state.attempts == 1
    left = on_disk(tmp_path / "ledger.sqlite", tmp_path / "crashed.sqlite")
    with closing(Ledger.open(left)) as crashed:  # it may be the attempt that ends everything
        assert crashed.facts[f"attempts.{fleet.queue[0]}"] == "1"
