"""A storage process, its shards, its actors and its learner without a bus, in any order of events."""

import random
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field

from bus.messages import GroupRejected
from bus.requests import StoredGroups
from storage.dispatch.admission import Admission
from storage.ledger.ledger import Ledger, prepare
from storage.settings.admission import (
    NO_ESS_BRAKE,
    AdmissionConfig,
    EssBrakeConfig,
    FifoSampler,
    FreshnessSampler,
    PrioritySampler,
    UniformSampler,
)
from tests.storage.serving import manifest

SHARDS = 2
PATIENCE_S = 5.0


def random_config(draw: random.Random, *, before: AdmissionConfig | None = None) -> AdmissionConfig:
    """A configuration; `before` keeps its strategy."""
    staleness = draw.randrange(4)
    if before is None:
        kind = draw.choice([FifoSampler, FifoSampler, UniformSampler, FreshnessSampler, PrioritySampler])
        reuse = draw.choice([1, 1, 2, 3])
        most = draw.choice([None, None, 1.0, 2.5])
    else:
        kind, reuse = type(before.sampler), before.sampler.max_reuse
        most = before.sampler.max_samples_per_insert
    least = draw.choice([0.5, 1.0, 1.0, min(float(reuse), staleness + 1.0)])
    exact = draw.random() < 0.2 if before is None else before.exact_staleness
    if exact and reuse > 1:  # the only configurations that are taken
        kind, staleness, least = FifoSampler, max(staleness, reuse - 1), float(reuse)
    most = None if most is None else max(most, least)
    return AdmissionConfig(
        groups_per_step=draw.randint(1, 3),
        max_staleness=staleness,
        exact_staleness=exact,
        incomplete=draw.choice(["wait", "drop", "close_short"]) if before is None else before.incomplete,
        patience_s=PATIENCE_S,
        ess_brake=EssBrakeConfig(below=0.6, steps=2) if staleness % 2 else NO_ESS_BRAKE,
        sampler=kind(max_reuse=reuse, min_samples_per_insert=least, max_samples_per_insert=most),
    )


@dataclass
class World:
    """Everything outside the dispatcher is durable; the dispatcher is what its ledger last flushed."""

    draw: random.Random
    config: AdmissionConfig
    sql: sqlite3.Connection
    ledger: Ledger = field(init=False)
    admission: Admission = field(init=False)
    tasks: set[int] = field(default_factory=set)
    """Leases on the bus, or rolling out."""
    versions: dict[int, int] = field(default_factory=dict)
    """The oldest weights that may sample each lease, as its message says."""
    sampled: dict[int, int] = field(default_factory=dict)
    """The weights that did, the oldest of them."""
    parts: dict[int, int] = field(default_factory=dict)
    """Siblings that are stored of groups that are not complete."""
    rejections: list[GroupRejected] = field(default_factory=list)
    shards: list[list[int]] = field(default_factory=lambda: [[] for _ in range(SHARDS)])
    """Leases in the order in which their groups became complete."""
    incarnation: int = 0
    step: int = 0
    """The learner's step."""
    checkpoint: int = 0
    trained: dict[int, list[int]] = field(default_factory=dict)
    """What each step of the weights as they are was trained on."""
    given: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    """What the learner was answered for its next steps, and the bound then in force."""
    now_s: float = 0.0
    same_config: bool = True
    """Whether it is the one that the run began with."""

    fractions: random.Random = field(default_factory=lambda: random.Random(5))
    """Effective sample sizes, so that the brake of some configurations holds again and again."""
    quarantined: set[int] = field(default_factory=set)
    """Leases whose turn falls to a prompt that killed its actors."""

    def __post_init__(self) -> None:
        self.quarantined.update(n for n in range(1000) if self.draw.random() < 0.05)
        self.load()
        self.resume()

    # --- the dispatcher ---

    def load(self) -> None:
        """Start from what the disk holds: what was not flushed is lost."""
        self.ledger = Ledger(self.sql)
        self.admission = Admission(
            self.ledger, self.config, seed=3, is_quarantined=self.quarantined.__contains__
        )
        self.admission.opened = True
        if self.published is not None:
            self.admission.on_policy(self.published)
        through = int(self.ledger.facts.get("published_through", "-1"))
        self.send(n for n in self.ledger.rolling_out if n > through)

    published = None

    def send(self, leases: Iterable[int]) -> None:
        for lease_id in leases:
            self.tasks.add(lease_id)
            self.versions[lease_id] = self.ledger.rolling_out[lease_id].policy_version

    def crash(self) -> None:
        self.load()

    def change_config(self) -> None:
        """Everything restarts with another bound or batch size, or storage alone."""
        self.config, self.same_config = random_config(self.draw, before=self.config), False
        self.load()
        if self.draw.random() < 0.7:
            self.restart_learner()

    def issue(self) -> None:
        leases = self.admission.issue()
        if self.draw.random() < 0.1:
            return self.crash()
        self.ledger.flush()
        assert not self.quarantined.intersection(leases)
        sent = leases if self.draw.random() < 0.9 else leases[: len(leases) // 2]
        self.send(sent)
        if sent != leases:
            return self.crash()  # half published
        if leases:
            self.ledger.set_fact("published_through", str(max(leases)))
            self.ledger.flush()
        return None

    def hear(self) -> None:
        """A notice or a poll of a shard, some of it a second time."""
        shard = self.draw.randrange(SHARDS)
        seen = self.admission.seen(shard)
        after = max(0, seen - self.draw.randrange(2))
        completed = self.shards[shard]
        news = tuple(completed[after:])
        spreads = tuple(float(n % 3) for n in news)
        self.admission.on_stored(
            StoredGroups(shard=shard, after=after, lease_ids=news, total=len(completed), spreads=spreads)
        )

    def refund(self) -> None:
        """Rejections are acked once they are flushed: a crash before brings them again."""
        self.admission.on_rejected(self.rejections)
        if self.draw.random() < 0.1:
            return self.crash()
        self.ledger.flush()
        if self.draw.random() < 0.9:
            self.rejections = []
        return None

    # --- the actors ---

    def complete(self) -> None:
        """Roll out with the weights of the day, if they may."""
        if self.tasks:
            lease_id = self.draw.choice(sorted(self.tasks))
            if not self.may_sample(lease_id):
                return
            shard = self.shards[lease_id % SHARDS]
            if lease_id not in shard:  # else it was closed short, and takes no more
                self.sample(lease_id)
                shard.append(lease_id)
            if self.draw.random() < 0.9:  # else its ack is lost, and it is delivered again
                self.tasks.discard(lease_id)

    def finish_one(self) -> None:
        """A sibling is stored before the others are finished."""
        if self.tasks:
            lease_id = self.draw.choice(sorted(self.tasks))
            if self.may_sample(lease_id) and lease_id not in self.shards[lease_id % SHARDS]:
                self.sample(lease_id)
                self.parts[lease_id] = self.parts.get(lease_id, 0) + 1

    def sample(self, lease_id: int) -> None:
        version = self.published.policy_version
        self.sampled[lease_id] = min(version, self.sampled.get(lease_id, version))

    def close_short(self) -> None:
        """What the shards close stays so, whatever the dispatcher hears of it."""
        complete, few = [], []
        for lease_id in sorted(self.admission.to_close):
            shard = self.shards[lease_id % SHARDS]
            if lease_id not in shard and self.parts.get(lease_id, 0) >= 2:
                shard.append(lease_id)
            (complete if lease_id in shard else few).append(lease_id)
        if self.draw.random() < 0.1:
            return self.crash()
        self.admission.on_closed(complete, few)
        return None

    def may_sample(self, lease_id: int) -> bool:
        """An actor whose weights are too old asks whether they have to be younger still."""
        version = self.published.policy_version
        if version < self.versions[lease_id]:
            state = self.admission.state(lease_id)
            self.ledger.flush()
            if state.state != "open":
                self.tasks.discard(lease_id)
                return False
            self.versions[lease_id] = state.policy_version
        return version >= self.versions[lease_id]

    def reject(self) -> None:
        if self.tasks:
            lease_id = self.draw.choice(sorted(self.tasks))
            self.rejections.append(GroupRejected(lease_id=lease_id, reason="zero_variance"))
            if self.draw.random() < 0.9:
                self.tasks.discard(lease_id)

    # --- the learner ---

    def publish(self) -> None:
        self.published = manifest(
            self.step, incarnation=str(self.incarnation), ess_fraction=self.fractions.random()
        )
        self.admission.on_policy(self.published)

    def resume(self) -> None:
        self.admission.resume(self.step, str(self.incarnation))
        self.ledger.flush()
        self.publish()

    def restart_learner(self) -> None:
        """It goes on from its last checkpoint, and its predecessor is heard no more."""
        self.incarnation += 1
        self.step, self.given = self.checkpoint, {}
        self.trained = {step: groups for step, groups in self.trained.items() if step <= self.step}
        self.resume()

    def ask(self, step: int) -> bool:
        """Whether the step has its groups now; asked again it has the same ones."""
        answer = self.admission.batch(step, step - 1, now_s=self.now_s)
        if isinstance(answer, str):
            assert answer
            if self.draw.random() < 0.8:
                self.close_short()
            return False
        groups = [use.lease_id for use in answer]
        if step in self.given:
            assert groups == self.given[step][0]
            return True
        self.check_batch(step, groups)
        if self.draw.random() < 0.05:
            self.crash()  # before it was durable: nobody heard of it
            return False
        self.ledger.flush()
        if self.draw.random() < 0.05:
            self.crash()  # after, and before the answer arrived
        self.given[step] = groups, self.config.max_staleness
        return True

    def check_batch(self, step: int, groups: list[int]) -> None:
        sampler = self.config.sampler
        assert len(set(groups)) == len(groups) == self.config.groups_per_step
        uses = {n: sum(n in given for given in self.before(step)) for n in groups}
        for use in self.ledger.uses(step):
            assert step - 1 - use.group.policy_version <= self.config.max_staleness
            assert step - 1 - self.sampled[use.lease_id] <= self.config.max_staleness
            assert uses[use.lease_id] < sampler.max_reuse
        if sampler.max_samples_per_insert is not None:
            assert self.ledger.samples <= sampler.max_samples_per_insert * self.ledger.inserted() + 1e-6

    def before(self, step: int) -> list[list[int]]:
        """What every other step was given."""
        pending = [groups for s, (groups, _) in self.given.items() if s != step and s not in self.trained]
        return [*(groups for s, groups in self.trained.items() if s != step), *pending]

    def train(self) -> None:
        if self.ask(self.step + 1):
            groups, _ = self.given.pop(self.step + 1)
            self.step += 1
            self.trained[self.step] = groups
            self.publish()

    def prefetch(self) -> None:
        if self.step + 1 in self.given:
            self.ask(self.step + 2)
        else:
            self.ask(self.step + 1)

    def save(self) -> None:
        self.checkpoint = self.step
        self.admission.commit(self.step, str(self.incarnation))
        if self.draw.random() < 0.9:
            self.ledger.flush()

    def poll(self) -> None:
        self.now_s += 1.0
        self.ledger.flush()

    # --- what must hold ---

    def check(self) -> None:
        """After every event."""
        account = self.ledger.account()
        assert account.balanced()
        uses = self.ledger.samples
        assert uses == sum(len(self.ledger.uses(step)) for step in range(1, self.step + 4))
        for step, groups in self.trained.items():
            assert [use.lease_id for use in self.ledger.uses(step)] == groups
        sampler = self.config.sampler
        if sampler.max_reuse == 1:
            assert account.trained == uses
            thrifty = isinstance(sampler, FifoSampler) and sampler.min_samples_per_insert == 1
            if thrifty and self.same_config:
                assert not self.ledger.reasons["stale"]

    def settle(self) -> None:
        """From any state, once everybody does their work, the learner goes on."""
        goal = self.step + 3
        for _ in range(60):
            if self.step >= goal:
                return
            self.now_s += PATIENCE_S
            self.issue()
            for _ in range(20 * len(self.tasks)):
                self.complete()
            self.refund()
            for _ in range(8):
                self.hear()
            self.train()
        raise AssertionError(
            f"stuck at step {self.step}: {self.ledger.account()}, room {self.admission.room()}, "
            f"{self.admission.batch(self.step + 1, self.step, now_s=self.now_s)}"
        )


EVENTS = {
    World.complete: 10, World.finish_one: 6, World.hear: 8, World.train: 6, World.prefetch: 4, World.issue: 6,
    World.reject: 2, World.refund: 3, World.poll: 3, World.save: 2, World.crash: 1, World.restart_learner: 1,
    World.change_config: 1,
}  # fmt: skip
_EVENTS, _WEIGHTS = list(EVENTS), list(EVENTS.values())


def play(sql: sqlite3.Connection, seed: int, *, events: int) -> World:
    """One random interleaving, checked after each event; it ends with the run going on."""
    for table in ("leases", "uses", "facts"):
        sql.execute(f"DELETE FROM {table}")
    draw = random.Random(seed)
    world = World(draw, random_config(draw), sql)
    for event in draw.choices(_EVENTS, _WEIGHTS, k=events):
        event(world)
        world.check()
    world.settle()
    world.check()
    return world


def play_many(seeds: range, *, events: int) -> int:
    """So many interleavings; steps trained in all of them together."""
    with closing(sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)) as sql:
        prepare(sql)
        steps = 0
        for seed in seeds:
            try:
                steps += play(sql, seed, events=events).step
            except Exception as error:
                error.add_note(f"interleaving {seed} of {events} events")
                raise
        return steps
