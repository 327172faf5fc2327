"""Whatever happens to the engines, every request ends once, whole, with tokens that fit together."""

import asyncio
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engines.base import GenerationRequest, Sampling
from actors.engines.fleet.fleet import Fleet
from actors.settings.fleet import FleetConfig
from bus.errors import EngineError
from tests.actors.paced_engine import PacedEngine, chain, experts_of
from tests.actors.virtual_time import run_virtually

KINDS = [
    *["submit"] * 4,
    *["wait", "update"] * 2,
    *["crash", "hang", "glitch", "abort", "cancel", "join", "leave"],
]


@dataclass
class Asked:
    """One request, and what may become of it."""

    request: GenerationRequest
    task: asyncio.Task
    bound: int
    """The fleet's version when it came: none of its tokens is older."""
    aborted: bool = False
    cancelled: bool = False


@dataclass
class World:
    """A fleet to which things happen."""

    random: Random
    per_engine: int
    engines: list[PacedEngine] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    updates: list[asyncio.Task] = field(default_factory=list)
    leaving: list[asyncio.Task] = field(default_factory=list)
    left: set[str] = field(default_factory=set)
    version: int = 0
    names: int = 0
    calm: bool = False
    ended: dict[str, int] = field(default_factory=dict)

    def __post_init__(self):
        count = self.random.randint(1, 3)
        names = {f"e{n}": self.build for n in range(count)}
        self.names = count
        config = FleetConfig(
            requests_per_engine=self.per_engine,
            refill=self.random.choice([0, 0.4, 0.9]),
            updated_at_once=self.random.choice([0.25, 0.5, 1.0]),
            attempts=1000,
            restarts=1000,
            affinity_slack=self.random.randint(0, 2),
            request_timeout_s=self.random.choice([6.0, 1800.0]),
            update_timeout_s=30,
            health_period_s=5,
            health_timeout_s=5,
            drain_timeout_s=2,
            close_timeout_s=5,
            backoff_max_s=2,
        )
        self.fleet = Fleet(names, config)

    async def build(self):
        await asyncio.sleep(self.random.choice([0, 1, 7]))
        if not self.calm and self.engines and self.random.random() < 0.2:
            raise EngineError("it does not start")
        engine = PacedEngine(
            token_s=self.random.choice([0.3, 1.0, 1.7]),
            update_s=self.random.choice([0, 0.5, 4]),
            abort_s=self.random.choice([0, 0, 0.5]),
            keeps=self.random.random() < 0.5,
        )
        engine.before = self.check_begins
        self.engines.append(engine)
        return engine

    def check_begins(self, engine, request):
        """No request is at two engines, no engine has too many, none serves before it has weights."""
        base = request.request_id.rsplit("-", 1)[1]
        at = [e for e in self.engines if any(other.endswith(f"-{base}") for other in e.working)]
        assert not at, f"{request.request_id} is still at an engine"
        assert len(engine.working) < self.per_engine
        [bound] = [asked.bound for asked in self.asked if asked.request.request_id == base]
        assert engine.policy_version >= max(0, bound)
        others = {run.request.request_id for e in self.engines for run in e.working.values()}
        assert not any(a.startswith(request.request_id) or request.request_id.startswith(a) for a in others)

    def happen(self, kind):
        if kind == "submit":
            self.submit()
        elif kind == "update":
            self.version += 1
            state = (
                {"a": self.version} if self.random.random() < 0.5 else {"a": self.version, "b": self.version}
            )
            self.updates.append(asyncio.create_task(self.fleet.load_weights(state, self.version)))
        elif kind in ("crash", "hang") and self.engines:
            getattr(self.random.choice(self.engines), kind)()
        elif kind == "glitch" and (runs := [run for e in self.engines for run in e.working.values()]):
            self.random.choice(runs).versions.append(0)  # what it returns is no generation
        elif kind == "join":
            self.names += 1
            self.fleet.join(f"e{self.names}", self.build)
        elif kind == "leave" and len(staying := sorted(set(self.fleet.engines) - self.left)) > 1:
            name = self.random.choice(staying)
            self.left.add(name)
            self.leaving.append(asyncio.create_task(self.fleet.leave(name)))
        elif kind in ("abort", "cancel") and (open_ := [a for a in self.asked if not a.task.done()]):
            one = self.random.choice(open_)
            if kind == "cancel":
                one.cancelled = one.task.cancel()
            else:
                one.aborted = True
                self.leaving.append(asyncio.create_task(self.fleet.abort(one.request.request_id)))

    def submit(self):
        prompt = [self.random.randint(1, 9) for _ in range(self.random.choice([1, 3, 40]))]
        new = self.random.randint(1, 20)
        experts_from = self.random.choice([None, 0, len(prompt) - 1])
        request = GenerationRequest(f"r{len(self.asked)}", prompt, Sampling(max_new_tokens=new), experts_from)
        task = asyncio.create_task(self.fleet.generate(request))
        task.add_done_callback(
            lambda _: self.ended.update({request.request_id: self.ended.get(request.request_id, 0) + 1})
        )
        self.asked.append(Asked(request, task, self.fleet.policy_version))

    def check_ended(self, asked):
        name, new = asked.request.request_id, asked.request.sampling.max_new_tokens
        assert self.ended[name] == 1
        if asked.task.cancelled():
            assert asked.cancelled
            return
        found = asked.task.result()
        tokens = found.token_ids.tolist()
        assert tokens == chain(asked.request.token_ids, new)[: len(tokens)]
        assert found.logprobs.tolist() == pytest.approx([-token / 100 for token in tokens])
        assert len(found.policy_versions) == len(tokens)
        if found.finish_reason == "abort":
            assert asked.aborted
        else:
            assert (found.finish_reason, len(tokens)) == ("length", new)
        if asked.request.experts_from is None:
            assert found.routed_experts is None
        else:
            expected = experts_of([*asked.request.token_ids, *tokens])[asked.request.experts_from :]
            known = [] if found.routed_experts is None else found.routed_experts.tolist()
            assert known == expected.tolist()[: len(known)]
            assert len(known) == len(expected) or found.finish_reason == "abort"
        if tokens:
            assert max(0, asked.bound) <= found.policy_versions.min()
            assert found.policy_versions.max() <= self.version


async def live_through(kinds, seed, per_engine):
    world = World(Random(seed), per_engine)
    await world.fleet.start()
    await world.fleet.load_weights({"a": 0, "b": 0}, 0)
    for kind in kinds:
        world.happen(kind)
        await asyncio.sleep(world.random.choice([0, 0.1, 2, 9]) if kind == "wait" else 0)
    world.calm = True
    everything = [*(asked.task for asked in world.asked), *world.updates, *world.leaving]
    if everything:
        await asyncio.wait(everything)
    await asyncio.sleep(60)  # what was cancelled last is aborted, what was lost is built again
    for task in [*world.updates, *world.leaving]:
        task.result()
    for asked in world.asked:
        world.check_ended(asked)
    assert world.fleet.policy_version == world.version
    assert (world.fleet.running, world.fleet.waiting) == (0, 0)
    for engine in world.engines:
        assert not engine.working
        versions = [version for version, _ in engine.loads]
        assert versions == sorted(versions), "versions never run backwards"
        assert engine.most_at_once <= per_engine
    serving = [engine for engine in world.engines if not engine.closed and engine.policy_version >= 0]
    assert all(engine.weights["a"] == engine.policy_version for engine in serving)
    await world.fleet.close()
    assert all(engine.closed for engine in world.engines)


INTERLEAVINGS = {
    "kinds": st.lists(st.sampled_from(KINDS), min_size=1, max_size=60),
    "seed": st.integers(0, 1 << 32),
    "per_engine": st.integers(1, 4),
}


@settings(max_examples=30)
@given(**INTERLEAVINGS)
def test_every_request_ends_once_and_whole(kinds, seed, per_engine):
    run_virtually(live_through(kinds, seed, per_engine))


@pytest.mark.nightly
@settings(max_examples=2000)
@given(**INTERLEAVINGS)
def test_every_request_ends_once_and_whole_in_thousands_of_interleavings(kinds, seed, per_engine):
    run_virtually(live_through(kinds, seed, per_engine))
