"""Success by source of prompts, kept in the ledger, the shares that follow from it, and what of each step
came from which source."""

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

import structlog

from bus.codec import Json, encode
from bus.connection import Bus
from bus.errors import BusError
from bus.messages import Metrics
from bus.streams.publish import Publisher
from bus.waiting import set_within
from storage.ledger.ledger import Ledger
from storage.prompts.data_sets import DataSets
from storage.settings.data import BandCurriculum, Curriculum, NoCurriculum

log = structlog.get_logger()
MEMORY_GROUPS = 64.0
"""Groups over which success is averaged where there is no curriculum."""
NO_CURRICULUM = NoCurriculum()
PRIOR_GROUPS = 1.0
"""Groups with a success of 1/2 that each source is taken to have had before its first."""
_SUCCESS, _SINCE = "source_success.", "groups_since_mix"
"""Prefix of the ledger's facts on sources, and the fact that counts groups since the shares last changed."""
PERIOD_S = 1.0
TOLD = "sources_told"
"""Fact of the ledger: the latest step whose sources were told of."""


@dataclass(frozen=True, slots=True)
class Success:
    """Rewards of a source's groups, averaged with weights that fall by a constant factor from each to the one
    before."""

    groups: int = 0
    """Groups with known rewards, filtered ones among them."""
    weight: float = 0.0
    """Sum of the weights of the groups."""
    reward_sum: float = 0.0
    """Weighted sum of the groups' mean rewards."""
    solved_sum: float = 0.0
    """Weighted sum of the fractions of each group's rollouts that solved the prompt."""

    def after(self, rewards: Sequence[float], *, solved_at: float, memory_groups: float) -> "Success":
        """Return the sums with one more group, of these rewards."""
        keep = 1 - 1 / memory_groups
        return Success(
            groups=self.groups + 1,
            weight=keep * self.weight + 1,
            reward_sum=keep * self.reward_sum + fmean(rewards),
            solved_sum=keep * self.solved_sum + fmean(reward >= solved_at for reward in rewards),
        )

    @property
    def solved(self) -> float:
        """Return the fraction of rollouts that solve the source's prompts, 1/2 before any was rolled out."""
        return (self.solved_sum + PRIOR_GROUPS / 2) / (self.weight + PRIOR_GROUPS)

    @property
    def figures(self) -> dict[str, float]:
        """Return the mean reward and the solved fraction; none before the first group."""
        if not self.groups:
            return {}
        return {"reward": self.reward_sum / self.weight, "solved": self.solved_sum / self.weight}


def preference(curriculum: Curriculum, solved: float) -> float:
    """Return how much a source is preferred, from 0 to 1, whose rollouts succeed in a fraction `solved`.

    `learnability` is 4 p (1 - p), the variance of a reward of 0 or 1 over its largest (arXiv:2502.12272). In
    a `band` (arXiv:2504.03380) it is 1, and outside it falls in proportion to 0 at p = 0 and p = 1."""
    if not isinstance(curriculum, BandCurriculum):
        return 4 * solved * (1 - solved)
    if solved < curriculum.low:
        return solved / curriculum.low
    if solved > curriculum.high:
        return (1 - solved) / (1 - curriculum.high)
    return 1.0


def weights(
    curriculum: Curriculum, configured: Mapping[str, float], solved: Mapping[str, float]
) -> dict[str, float]:
    """Return the weights of the sources, which add up to 1.

    Each source keeps `floor` of its configured share s; the rest is divided in proportion to s times its
    preference, or to s alone where nothing is preferred.

    Args:
        curriculum: what is preferred.
        configured: weight of each source.
        solved: fraction of its rollouts that solve each source's prompts."""
    total = sum(configured.values())
    share = {name: weight / total for name, weight in configured.items()}
    wanted = {name: share[name] * preference(curriculum, solved[name]) for name in configured}
    if (sum_wanted := sum(wanted.values())) <= 0:
        return share
    floor = curriculum.floor
    return {name: floor * share[name] + (1 - floor) * wanted[name] / sum_wanted for name in configured}


class SourceSuccess:
    """Success of each source of a mixture, and the curriculum that moves their shares.

    What it learns is part of the ledger: a crash counts no group twice, and forgets none. As a `Supply` it
    has all prompts."""

    left = math.inf
    waits_for = ""

    def __init__(
        self,
        ledger: Ledger,
        data: DataSets,
        curriculum: Curriculum | NoCurriculum = NO_CURRICULUM,
        *,
        solved_at: float = 1.0,
    ) -> None:
        self._ledger = ledger
        self._data = data
        self._curriculum = curriculum
        self._solved_at = solved_at
        self._memory_groups = (
            MEMORY_GROUPS if isinstance(curriculum, NoCurriculum) else curriculum.memory_groups
        )

    @property
    def wants_rewards(self) -> bool:
        """Tell whether rewards of groups are asked for: there are sources to tell apart."""
        return bool(self._data.latest.sources)

    def note(self, lease_id: int, rewards: Sequence[float]) -> None:
        """Count the group of a lease, whose rewards these are; one without rewards says nothing of success.
        Called once a lease, before what settled it is flushed."""
        source = self._data.source(lease_id)
        if not source or not rewards:
            return
        after = self.of(source).after(rewards, solved_at=self._solved_at, memory_groups=self._memory_groups)
        self._ledger.set_fact(f"{_SUCCESS}{source}", json.dumps(asdict(after)))
        self._ledger.set_fact(_SINCE, str(self._since + 1))

    async def extend(self, wanted: int, stop: asyncio.Event) -> None:
        """Move the shares if that is due, before leases are issued by them."""
        self.mix_if_due()

    def of(self, source: str) -> Success:
        known = self._ledger.facts.get(f"{_SUCCESS}{source}")
        return Success() if known is None else Success(**json.loads(known))

    def mix_if_due(self) -> bool:
        """Change the shares if enough groups have come since the last time; return whether it did."""
        curriculum, sources = self._curriculum, self._data.latest.sources
        if isinstance(curriculum, NoCurriculum) or not sources or self._since < curriculum.every_groups:
            return False
        solved = {one.name: self.of(one.name).solved for one in sources}
        found = weights(curriculum, {one.name: one.weight for one in sources}, solved)
        self._data.mix(found)
        self._ledger.set_fact(_SINCE, "0")
        log.info("sources_mixed", shares={one.name: one.share for one in self._data.latest.sources})
        return True

    @property
    def figures(self) -> dict[str, dict[str, float]]:
        """Return by source its share, the prompts drawn from it, its groups, mean reward and solved
        fraction."""
        drawn, sources = self._data.drawn, self._data.latest.sources
        whole = sum(one.share for one in sources)
        found = {}
        for one in sources:
            success = self.of(one.name)
            found[one.name] = {
                "share": one.share / whole,
                "drawn": drawn[one.name],
                "groups": success.groups,
                **success.figures,
            }
        return found

    @property
    def _since(self) -> int:
        return int(self._ledger.facts.get(_SINCE, "0"))


def source_values(ledger: Ledger, data: DataSets, success: SourceSuccess, step: int) -> dict[str, Json]:
    """Return the numbers of each source at `step`: its groups in that step's batch, its share, the prompts
    drawn from it, its groups with known rewards, and of these the mean reward and the solved fraction."""
    trained = Counter(data.source(use.lease_id) for use in ledger.uses(step))
    values: dict[str, Json] = {}
    for name, figures in success.figures.items():
        values |= {f"source/{name}/{figure}": value for figure, value in figures.items()}
        values[f"source/{name}/groups_in_step"] = trained[name]
    return values


async def report_sources(
    bus: Bus, ledger: Ledger, data: DataSets, success: SourceSuccess, stop: asyncio.Event
) -> None:
    """Publish the numbers of every step that is given groups, until `stop`, where sources are mixed.

    The ledger knows which steps were told of: a restart leaves none out. It runs on the event loop on which
    the ledger is changed."""
    events, stopping = Publisher(bus), False
    while not stopping:
        stopping = await set_within(stop, PERIOD_S)
        told = int(ledger.facts.get(TOLD, "0"))
        if told > ledger.newest_step:  # a learner resumed before it, and is given those steps again
            told = ledger.newest_step
            ledger.set_fact(TOLD, str(told))
        while ledger.uses(told + 1):
            told += 1
            values = source_values(ledger, data, success, told)
            if values and not await _told(bus, events, ledger, told, values):
                break
            ledger.set_fact(TOLD, str(told))


async def _told(bus: Bus, events: Publisher, ledger: Ledger, step: int, values: dict[str, Json]) -> bool:
    metrics = Metrics(source="storage", step=step, time_s=time.time(), values=values)
    name = f"sources-{ledger.facts.get('incarnation', '')}-{step}"
    try:
        await events.publish(bus.subject("events", "metrics"), encode(metrics), message_id=name)
    except BusError as error:
        log.warning("sources_not_told", step=step, reason=str(error))
        return False
    return True
