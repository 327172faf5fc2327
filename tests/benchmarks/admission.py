"""Simulates storage's admission between a learner and actors, on a clock of its own: the ledger and every
decision are those of a run, and rollouts, steps and the bus are made up.

`python -m benchmarks.admission` prints what docs/performance.md has a table of; with `--json` it prints an
object a line, those of docs/measurements/admission_simulated.jsonl.
"""

import heapq
import json
import math
import random
import sqlite3
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import product
from statistics import fmean
from typing import Literal

from bus.messages import BlobRef, PolicyManifest
from bus.requests import StoredGroups
from storage.dispatch.admission import Admission
from storage.ledger.given_groups import Use
from storage.ledger.ledger import Ledger, prepare
from storage.settings.admission import AdmissionConfig

Ahead = Literal["need", "bound"]
Draw = Callable[[random.Random], float]
TAILS: dict[str, Draw] = {
    "h200": lambda chance: 0.4 + min(12.8, chance.lognormvariate(0, 1)),
    "lognormal": lambda chance: min(12.8, chance.lognormvariate(0, 1)),
    "pareto": lambda chance: min(20.0, chance.paretovariate(1.5)),
    "bimodal": lambda chance: chance.uniform(8, 12) if chance.random() < 0.1 else chance.uniform(0.5, 1.5),
}
"""Distributions of the time of a rollout, each with its longest; only their shape counts. That of the run of
docs/measurements/overlap_h200.jsonl has the time before the first token besides."""
RATIOS = (0.5, 0.9, 1.0, 1.2, 2.0)
WAYS: tuple[tuple[Ahead, int], ...] = (("bound", 4), ("need", 4), ("need", 12))
"""Ways of issuing groups, and bounds on staleness."""
SETTLING = 60
"""Steps that do not count, in which admission finds how much is needed."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Says what is simulated. A step takes 1 s of training."""

    tail: str = "lognormal"
    ratio: float = 1.2
    """Rollouts that actors end while their slots are full over those that the learner trains on, by time."""
    groups: int = 32
    samples: int = 8
    slots: int = 256
    ahead: Ahead = "need"
    max_staleness: int = 4
    steps: int = 140
    seed: int = 0
    reading: int = 0
    """Groups whose prompts the engines read, who count them among those that wait."""

    @property
    def mean_s(self) -> float:
        """Mean time of a rollout."""
        return self.slots / (self.ratio * self.groups * self.samples)

    def scale_s(self) -> float:
        """Seconds by which a draw of the tail is multiplied."""
        chance = random.Random(1)
        return self.mean_s / fmean(TAILS[self.tail](chance) for _ in range(50_000))


@dataclass
class Simulation:
    """A learner that asks for the next batch while it trains, and actors that begin the oldest leases first,
    a rollout a slot."""

    admission: Admission
    load: Load
    now: float = 0.0
    version: int = 0
    queue: deque[int] = field(default_factory=deque)
    """Lease of each rollout that has not begun."""
    running: list[tuple[float, int]] = field(default_factory=list)
    """End and lease of each that has."""
    left: dict[int, int] = field(default_factory=dict)
    """Rollouts of each lease that have not ended."""
    sampled_at: dict[int, int] = field(default_factory=dict)
    lengths: dict[int, list[float]] = field(default_factory=dict)
    trained: list[list[int]] = field(default_factory=list)
    """Leases of each step."""
    staleness: list[list[int]] = field(default_factory=list)
    began_s: list[float] = field(default_factory=list)
    idle_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    """Slots' time at work up to the beginning of each step."""

    def __post_init__(self) -> None:
        self._chance = random.Random(self.load.seed)
        self.scale_s, self._draw = self.load.scale_s(), TAILS[self.load.tail]
        self._busy_s = 0.0

    def train(self) -> None:
        """Take all steps."""
        self._publish(0)
        given = self._ask(1, 0)
        for step in range(1, self.load.steps + 1):
            self.began_s.append(self.now)
            self.busy_s.append(self._busy_s)
            given = given or self._generate(math.inf, (step, step - 1))
            self.idle_s.append(self.now - self.began_s[-1])
            self.trained.append([use.lease_id for use in given])
            self.staleness.append([step - 1 - self.sampled_at[lease] for lease in self.trained[-1]])
            ends_s = self.now + self._chance.lognormvariate(0, 0.05)
            given = self._ask(step + 1, step) or self._generate(ends_s, (step + 1, step))
            self._generate(ends_s)
            self._publish(step)

    def _publish(self, version: int) -> None:
        self.version = version
        self.admission.waiting = len(self.queue) // self.load.samples + self.load.reading
        weights = BlobRef(subject="nowhere", chunks=1, size_bytes=1, digest="0")
        self.admission.on_policy(
            PolicyManifest(
                policy_version=version, incarnation="a", snapshot=weights, model=weights, stage="rl"
            )
        )
        self._begin()

    def _begin(self) -> None:
        for lease in self.admission.issue():
            self.left[lease] = self.load.samples
            self.queue.extend([lease] * self.load.samples)
        while self.queue and len(self.running) < self.load.slots:
            lease, length = self.queue.popleft(), self.scale_s * self._draw(self._chance)
            self.sampled_at.setdefault(lease, self.version)
            self.lengths.setdefault(lease, []).append(length)
            heapq.heappush(self.running, (self.now + length, lease))

    def _ask(self, step: int, version: int) -> list[Use]:
        given = self.admission.batch(step, version, now_s=self.now)
        return [] if isinstance(given, str) else given

    def _generate(self, until_s: float, wanted: tuple[int, int] | None = None) -> list[Use]:
        """End rollouts until a time, or until the step of a version is given the groups that are wanted."""
        while self.running and self.running[0][0] <= until_s:
            self._wait(self.running[0][0])
            lease = heapq.heappop(self.running)[1]
            self.left[lease] -= 1
            if not self.left[lease]:
                after = self.admission.seen(0)
                stored = StoredGroups(shard=0, after=after, lease_ids=(lease,), total=after + 1)
                self.admission.on_stored(stored)
            self._begin()
            asks = wanted and not self.left[lease] and self.admission.enough_stored()
            if wanted and asks and (given := self._ask(*wanted)):
                return given
        self._wait(until_s)
        return []

    def _wait(self, until_s: float) -> None:
        self._busy_s += len(self.running) * (until_s - self.now)
        self.now = until_s

    def figures(self) -> dict[str, float]:
        """Return means over the steps that count."""
        steps = slice(min(SETTLING, self.load.steps // 2), None)
        began_s, busy_s = self.began_s[steps], self.busy_s[steps]
        took_s = began_s[-1] - began_s[0]
        return {
            "step_s": round(took_s / (len(began_s) - 1), 3),
            "staleness_mean": round(fmean(map(fmean, self.staleness[steps])), 2),
            "learner_idle": round(sum(self.idle_s[steps][:-1]) / took_s, 3),
            "slots_idle": round(1 - (busy_s[-1] - busy_s[0]) / took_s / self.load.slots, 3),
        }


def simulated(load: Load) -> Simulation:
    """Return the run, as it ended."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        prepare(connection)
        config = AdmissionConfig(
            groups_per_step=load.groups,
            samples_per_prompt=load.samples,
            max_staleness=load.max_staleness,
            ahead=load.ahead,
        )
        admission = Admission(Ledger(connection), config, seed=load.seed)
        admission.opened = True
        admission.resume(0, "a")
        simulation = Simulation(admission, load)
        simulation.train()
    return simulation


def loads() -> Iterator[Load]:
    """Return what the table has rows of: a run on H200s, groups of half the size, all tails and ratios."""
    for ahead, bound in WAYS:
        yield Load(tail="h200", ratio=1.4, ahead=ahead, max_staleness=bound)
        yield Load(groups=64, samples=4, ahead=ahead, max_staleness=bound)
    for tail, ratio, (ahead, bound) in product(("lognormal", "pareto", "bimodal"), RATIOS, WAYS):
        yield Load(tail=tail, ratio=ratio, ahead=ahead, max_staleness=bound)


def main() -> None:
    """Print a row as soon as it is known."""
    as_json = "--json" in sys.argv[1:]
    for load in loads():
        figures = simulated(load).figures()
        named = {
            name: value for name, value in asdict(load).items() if name not in ("slots", "seed", "reading")
        }
        if as_json:
            print(json.dumps({"simulated": True, **named, **figures}), flush=True)  # noqa: T201 - the report
        else:
            print(*(f"{name}={value}" for name, value in {**named, **figures}.items()), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
