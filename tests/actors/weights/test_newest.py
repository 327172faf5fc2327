"""Whatever is announced when, and however long fetching and loading take, the latest version wins."""

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engines.fleet.fleet import Fleet
from actors.settings.fleet import FleetConfig
from actors.weights.follow import Newest
from bus.messages import BlobRef, DeltaRef, PolicyManifest
from storage.weights.tensors import HostTensor, Weights
from tests.actors.paced_engine import PacedEngine
from tests.actors.virtual_time import run_virtually

BLOB = BlobRef(subject="blob", chunks=1, size_bytes=1, digest="0" * 32)
POLL_S = 1.0
LONGEST_FETCH_S, LONGEST_UPDATE_S, ENGINES = 9.0, 5.0, 3
IN_TIME_S = 3 * POLL_S + 2 * LONGEST_FETCH_S + 2 * ENGINES * LONGEST_UPDATE_S
"""For what is under way, and then the latest: however many were announced."""


def manifest_of(version, *, learner="one", snapshot=None, since=None):
    """`since` is where its deltas begin."""
    deltas = tuple(
        DeltaRef(base_version=n, policy_version=n + 1, blob=BLOB)
        for n in range(version if since is None else since, version)
    )
    return PolicyManifest(
        policy_version=version, incarnation=learner, snapshot=BLOB, model=BLOB, stage="rl",
        snapshot_version=snapshot, deltas=deltas,
    )  # fmt: skip


def weights_of(manifest):
    """One tensor of each version, one that changes with every third, and one that never does."""
    number = manifest.policy_version + 1000 * sum(manifest.incarnation.encode())
    words = {"every": number, "third": number // 3, "never": 7}
    tensors = {name: HostTensor("U32", (1,), np.array([word], np.uint32)) for name, word in words.items()}
    return Weights.of(manifest.policy_version, tensors)


@dataclass
class Path:
    """What is fetched and loaded; a fetch takes the next of `fetches_s`, and fails where that is negative."""

    fleet: Fleet
    fetches_s: list[float] = field(default_factory=list)
    loads_at_once: int = 2
    refused: list[int] = field(default_factory=list)
    """Versions that an engine cannot be given, each once."""
    asked: list[PolicyManifest] = field(default_factory=list)
    received: list[PolicyManifest] = field(default_factory=list)
    loaded: list[int] = field(default_factory=list)
    given: dict[str, bytes] = field(default_factory=dict)
    busy: bool = False

    def __post_init__(self):
        self.newest = Newest(self.receive, self.load, loads_at_once=self.loads_at_once)

    async def receive(self, manifest):
        assert not self.busy, "one fetch at a time"
        self.busy = True
        self.asked.append(manifest)
        seconds = self.fetches_s.pop(0) if self.fetches_s else LONGEST_FETCH_S
        try:
            await asyncio.sleep(abs(seconds))
        finally:
            self.busy = False
        if seconds < 0:
            return None
        self.received.append(manifest)
        return weights_of(manifest)

    async def load(self, weights):
        version = weights.policy_version
        assert version == self.received[-1].policy_version, "a version was loaded that was overtaken"
        self.loaded.append(version)
        if version in self.refused:
            self.refused.remove(version)
            return False
        changed, self.given = weights.changed_since(self.given), weights.digests
        await self.fleet.load_weights(changed, version)
        return True

    @asynccontextmanager
    async def followed(self):
        await self.fleet.start()
        stop = asyncio.Event()
        running = asyncio.create_task(self.run(stop))
        yield self
        stop.set()
        await running
        await self.fleet.close()

    async def run(self, stop):
        async with asyncio.TaskGroup() as tasks:
            while not stop.is_set():
                await self.newest.pursue(tasks)
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self.newest.news.wait()
            await self.newest.stop_fetching()


def fleet_of(engines, *, at_once=0.5):
    async def build(engine):
        return engine

    builds = {f"e{n}": lambda engine=engine: build(engine) for n, engine in enumerate(engines)}
    return Fleet(builds, FleetConfig(updated_at_once=at_once, health_period_s=1000))


def have(engines, manifest):
    expected = weights_of(manifest).tensors
    return all(
        engine.policy_version == manifest.policy_version
        and engine.weights.keys() == expected.keys()
        and all(np.array_equal(engine.weights[name].words, tensor.words) for name, tensor in expected.items())
        for engine in engines
    )


def announced(gaps_and_kinds):
    """What learners announce, and the pause before each: a next version, a snapshot, another learner."""
    version, snapshot, before, learner = 0, 0, 0, 0
    for gap_s, kind in gaps_and_kinds:
        if kind == "resume":
            learner, version = learner + 1, max(0, version - 2)
            snapshot = before = version
        else:
            version += 1
        if kind == "snapshot":
            before, snapshot = snapshot, version
        yield gap_s, manifest_of(version, learner=f"learner-{learner}", snapshot=snapshot, since=before)


@settings(max_examples=80)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.0, 0.3, 2.0, 20.0]),
            st.sampled_from(["next"] * 6 + ["snapshot", "resume"]),
        ),
        min_size=1,
        max_size=30,
    ),
    st.lists(st.floats(-LONGEST_FETCH_S, LONGEST_FETCH_S), max_size=40),
    st.lists(st.floats(0, LONGEST_UPDATE_S), min_size=ENGINES, max_size=ENGINES),
    st.sampled_from([1, 2]),
)
def test_the_latest_version_wins_in_bounded_time(arrivals, fetches_s, updates_s, loads_at_once):
    async def scenario():
        engines = [PacedEngine(f"e{n}", update_s=update_s) for n, update_s in enumerate(updates_s)]
        path = Path(fleet_of(engines), fetches_s, loads_at_once)
        async with path.followed():
            for gap_s, manifest in announced(arrivals):
                await asyncio.sleep(gap_s)
                path.newest.hear(manifest)
            path.fetches_s = [abs(seconds) for seconds in path.fetches_s]
            await asyncio.sleep(IN_TIME_S)
            assert have(engines, manifest)
            orders = [path.asked.index(each) for each in path.received]
            assert orders == sorted(orders), "an older announcement was taken after a newer one"

    run_virtually(scenario())


def scene(test):
    """Run it on the virtual clock."""

    def run():
        run_virtually(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@scene
async def test_a_version_is_fetched_while_the_one_before_is_loaded_and_engines_go_right_to_it():
    engines = [PacedEngine(f"e{n}", update_s=4.0) for n in range(4)]
    path = Path(fleet_of(engines, at_once=0.25), [0.0, 0.0, 1.0])
    async with path.followed():
        path.newest.hear(manifest_of(0))
        await asyncio.sleep(17)
        path.newest.hear(manifest_of(1, snapshot=0, since=0))
        await asyncio.sleep(1)  # the first engine takes it
        path.newest.hear(manifest_of(2, snapshot=0, since=0))
        await asyncio.sleep(25)
        assert have(engines, manifest_of(2))
        assert [[version for version, _ in engine.loads] for engine in engines] == [
            [0, 1, 2], [0, 2], [0, 2], [0, 2]
        ]  # fmt: skip


@scene
async def test_a_fetch_goes_on_when_deltas_lead_from_it_to_the_newer_version():
    engines = [PacedEngine()]
    path = Path(fleet_of(engines), [5.0, 1.0])
    async with path.followed():
        path.newest.hear(manifest_of(3))
        await asyncio.sleep(1)
        path.newest.hear(manifest_of(4, snapshot=3, since=3))
        await asyncio.sleep(8)
        assert [manifest.policy_version for manifest in path.received] == [3, 4]
        assert have(engines, manifest_of(4))


@scene
async def test_snapshots_that_come_faster_than_they_are_fetched_arrive_now_and_then():
    path = Path(fleet_of([PacedEngine()]), [5.0] * 100)
    async with path.followed():
        for version in range(20):
            path.newest.hear(manifest_of(version))
            await asyncio.sleep(2.1)
        assert path.loaded == [0, 2, 4, 7, 9, 11, 14, 16]


@scene
async def test_what_could_not_be_loaded_is_fetched_again_unless_a_newer_version_was():
    engines = [PacedEngine(update_s=0.1)]
    path = Path(fleet_of(engines), [0.0] * 10, refused=[0, 1])
    async with path.followed():
        path.newest.hear(manifest_of(0))
        await asyncio.sleep(3 * POLL_S)
        assert have(engines, manifest_of(0))
        path.newest.hear(manifest_of(1))
        await asyncio.sleep(POLL_S / 2)
        path.newest.hear(manifest_of(2))
        await asyncio.sleep(3 * POLL_S)
        assert path.loaded == [0, 0, 1, 2]
        assert have(engines, manifest_of(2))


@scene
async def test_what_a_dead_learner_announced_is_fetched_no_more():
    engines = [PacedEngine()]
    path = Path(fleet_of(engines), [1000.0, 1.0])
    async with path.followed():
        path.newest.hear(manifest_of(10))
        await asyncio.sleep(1)
        path.newest.hear(manifest_of(8, learner="resumed"))
        await asyncio.sleep(3)
        assert have(engines, manifest_of(8, learner="resumed"))
    assert [manifest.policy_version for manifest in path.received] == [8]


@scene
async def test_an_older_announcement_of_the_same_learner_is_not_heard():
    path = Path(fleet_of([PacedEngine()]), [0.0])
    async with path.followed():
        path.newest.hear(manifest_of(3))
        path.newest.hear(manifest_of(2))
        await asyncio.sleep(3)
        assert path.loaded == [3]
