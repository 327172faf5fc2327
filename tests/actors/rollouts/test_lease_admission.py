"""Leases by free KV tokens: contexts neither overflow the cache, nor is it left idle."""

import asyncio
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from actors.engines.base import GenerationRequest, KvTokens, Sampling
from actors.engines.fleet.fleet import Fleet
from actors.policy.context_tokens import ContextTokens
from actors.rollouts.lease_admission import LeaseAdmission
from actors.settings.fleet import FleetConfig
from benchmarks.scripted_engine import ScriptedEngine
from tests.actors.virtual_time import run_virtually

CAPACITY = 4_000
SAMPLES = 2
TOKEN_S = 0.01
NEW = 50


class CachingEngine(ScriptedEngine):
    """A scripted engine that holds contexts while it answers them, and counts what would not have fitted."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        super().__init__(lambda tokens: [1] * NEW)
        self.capacity = capacity
        self.held: dict[str, int] = {}
        self.most = 0
        self.overflows = 0
        self.filled: list[tuple[float, int]] = []
        """Times, and the tokens held from then on."""

    @property
    def kv_tokens(self) -> KvTokens:
        return KvTokens(sum(self.held.values()), self.capacity, shares_prefixes=False)

    async def generate(self, request: GenerationRequest):
        tokens = len(request.token_ids) + NEW
        self.held[request.request_id] = tokens
        used = sum(self.held.values())
        self.most = max(self.most, used)
        self.overflows += used > self.capacity
        self._note()
        try:
            await asyncio.sleep(NEW * TOKEN_S)
            return await super().generate(request)
        finally:
            del self.held[request.request_id]
            self._note()

    def _note(self) -> None:
        self.filled.append((asyncio.get_running_loop().time(), sum(self.held.values())))

    def mean(self, begin: float, end: float) -> float:
        """The tokens held on average between two times."""
        points = [(max(begin, when), held) for when, held in self.filled if when < end]
        ends = [*(when for when, _ in points[1:]), end]
        return sum(held * (until - when) for (when, held), until in zip(points, ends, strict=True)) / (
            end - begin
        )


@dataclass
class Actor:
    """Leases without a bus: as many as the admission takes, each of episodes with several turns."""

    turns: tuple[int, int]
    added: tuple[int, int]
    tool_s: float
    groups_at_once: int = 64
    seed: int = 0
    engine: CachingEngine = field(default_factory=CachingEngine)
    contexts: ContextTokens = field(default_factory=ContextTokens)
    at_once: int = 0
    most_at_once: int = 0
    most_contexts: int = 0
    taken: int = 0
    ended: int = 0
    first_wave: int = 0
    """Leases that were taken before one had ended, and nobody knew how long contexts become."""
    steady: list[float] = field(default_factory=list)
    """When lengths were known, and when the last lease was taken."""
    live: dict[str, int] = field(default_factory=dict)

    async def run(self, leases: int) -> None:
        """Roll out all leases."""
        loop = asyncio.get_running_loop()
        fleet = Fleet({"engine": self._build}, FleetConfig(refill=0.0, requests_per_engine=4096))
        await fleet.start()
        admission = LeaseAdmission(self.contexts, lambda: fleet.kv_tokens, soft_share=0.8)
        async with asyncio.TaskGroup() as tasks:
            for lease_id in range(leases):
                while not admission.room(self.groups_at_once - self.at_once, not_begun=0):
                    await self.contexts.changed_within(0.5)
                self.at_once += 1
                self.taken += 1
                self.most_at_once = max(self.most_at_once, self.at_once)
                names = [f"g{lease_id}.{n}" for n in range(SAMPLES)]
                self.contexts.begin(lease_id, names)
                tasks.create_task(self._group(fleet, lease_id, names))
            self.steady.append(loop.time())
        await fleet.close()

    async def _build(self) -> CachingEngine:
        return self.engine

    async def _group(self, fleet: Fleet, lease_id: int, names: list[str]) -> None:
        await asyncio.gather(*(self._episode(fleet, name) for name in names))
        self.contexts.end(lease_id)
        self.at_once -= 1
        self.ended += 1
        self.first_wave = self.first_wave or self.taken
        if self.ended == 12:
            self.steady.append(asyncio.get_running_loop().time())

    async def _episode(self, fleet: Fleet, name: str) -> None:
        chance = random.Random(f"{self.seed} {name}")
        context = [1] * chance.randint(20, 100)
        for turn in range(chance.randint(*self.turns)):
            self.contexts.note(name, "solver", len(context), NEW)
            generation = await fleet.generate(
                GenerationRequest(f"{name}.{turn}", context, Sampling(max_new_tokens=NEW))
            )
            context = [*context, *generation.token_ids.tolist(), *[1] * chance.randint(*self.added)]
            self.contexts.note(name, "solver", len(context))
            self.live[name] = len(context)
            if self.first_wave and self.ended >= self.first_wave:
                self.most_contexts = max(self.most_contexts, sum(self.live.values()))
            await asyncio.sleep(chance.uniform(0, self.tool_s))
        self.live.pop(name, None)
        self.contexts.ended(name)


@settings(max_examples=5, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck))
@given(
    longest=st.integers(2, 6),
    added=st.integers(0, 60),
    tool_s=st.sampled_from([0.0, 0.5, 3.0]),
    seed=st.integers(0, 1000),
)
def test_long_contexts_neither_overflow_the_cache_nor_leave_it_idle(longest, added, tool_s, seed):
    actor = Actor(turns=(1, longest), added=(0, added), tool_s=tool_s, seed=seed)

    async def scenario() -> None:
        await actor.run(40)
        assert actor.engine.overflows == 0
        # later on those whose tools run fit beside those that are answered
        assert actor.most_contexts <= CAPACITY
        begin, end = sorted(actor.steady)
        if tool_s == 0.0 and end - begin > 2 * NEW * TOKEN_S:  # all contexts are at the engine, and fill it
            assert actor.engine.mean(begin, end) >= 0.4 * CAPACITY

    run_virtually(scenario())


def test_count_of_leases_is_the_upper_bound():
    actor = Actor(turns=(1, 1), added=(0, 0), tool_s=0.0, groups_at_once=3)
    run_virtually_all(actor, 20)
    assert actor.most_at_once == 3


def test_context_that_needs_more_than_the_cache_still_goes_alone():
    actor = Actor(turns=(3, 3), added=(50, 50), tool_s=0.0, engine=CachingEngine(capacity=60))
    run_virtually_all(actor, 3)
    assert actor.ended == 3
    assert max(len(request.token_ids) for request in actor.engine.requests) + NEW == actor.engine.most


def run_virtually_all(actor: Actor, leases: int) -> None:
    async def scenario() -> None:
        await actor.run(leases)

    run_virtually(scenario())


@pytest.mark.parametrize(("used", "expected"), [(0, 4), (400, 3), (800, 0), (950, 0)])
def test_room_is_what_a_further_lease_needs_of_what_is_left(used: int, expected: int):
    contexts = ContextTokens()
    contexts.begin(0, ["a"])
    contexts.note("a", "solver", 100, 60)
    told = KvTokens(used, 1000, shares_prefixes=False)
    admission = LeaseAdmission(contexts, lambda: told, soft_share=0.8)
    # a context is expected to take 160: (800 - max(160, used)) // 160
    assert admission.room(64, not_begun=0) == max(0, (800 - max(160, used)) // 160)
    assert admission.room(64, not_begun=0) in (expected, expected - 1)
    assert admission.room(64, not_begun=1) == max(0, (800 - max(160, used) - 160) // 160)


def test_engines_that_do_not_tell_leave_it_to_the_count():
    assert LeaseAdmission(ContextTokens(), lambda: None, soft_share=0.8).room(7, not_begun=3) == 7
