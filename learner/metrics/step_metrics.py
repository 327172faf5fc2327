"""The learner's numbers by name, `area/name_unit`, and who is told of them: screens, probes and the log."""

import asyncio
import time
from collections import deque
from collections.abc import Mapping

import structlog

from bus.actor_counters import SampledCounts
from bus.codec import Json, encode
from bus.connection import Bus
from bus.errors import BusError
from bus.messages import Metrics
from bus.security.permissions import COUNTERS
from bus.streams.publish import Publisher
from learner.backends.contract.backend import StepResult
from learner.config.diagnostics import DiagnosticsConfig
from learner.data.batches import StepBatch
from learner.metrics.range_warnings import RangeWarnings
from storage.metrics.records import integer, number

log = structlog.get_logger()
NAMED_BY_DATA = ("reward_part/", "source_")
"""Beginnings of the figures whose names are not Sluice's own."""
MOST_FIGURES = 1000
"""Such figures that have curves: names that change with each step would make files and screens grow without
end."""
LEFT_OUT = "train/figures_left_out"
"""Number of the figures of a step that are left out."""


class NamedFigures:
    """Lets those figures pass that came first, and counts the others."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._is_told = False

    def bounded(self, values: Mapping[str, Json]) -> dict[str, Json]:
        """Return the values of a step without named figures beyond the bound; those are counted."""
        named = [name for name in values if name.startswith(NAMED_BY_DATA)]
        new = [name for name in named if name not in self._known]
        room = MOST_FIGURES - len(self._known)
        self._known.update(new[:room])
        left_out = new[room:]
        if left_out and not self._is_told:
            self._is_told = True
            log.warning("figures_left_out", first=left_out[0], most=MOST_FIGURES)
        dropped = {*left_out}
        kept = {name: value for name, value in values.items() if name not in dropped}
        return kept | ({LEFT_OUT: len(left_out)} if left_out else {})


STEPS = 32
"""Latest steps over which both sides are compared: an actor's counters come every second, and the data of a
step was sampled some steps ago."""
NOTHING = SampledCounts()


class SelectionBias:
    """Sums up both sides over the latest steps.

    Group filters, failed or late rollouts and sampling strategies take trajectories away. Where long or hard
    ones are lost more often than others, the policy is trained on another distribution than it samples."""

    def __init__(self) -> None:
        self._told: dict[str, SampledCounts] = {}
        """The latest counters of each actor, which begin at its start."""
        self._sampled = NOTHING
        """Sampled since the last step."""
        self._steps: deque[tuple[SampledCounts, SampledCounts]] = deque(maxlen=STEPS)
        """What each step consumed, and what was sampled before it and after the step before."""

    def hear(self, metrics: Metrics) -> None:
        """Take note of an actor's counters. The first ones of an actor say only from where it counts on."""
        counts = SampledCounts.of(metrics.values)
        if counts is None:
            return
        if (before := self._told.get(metrics.source)) is not None:
            self._sampled = self._sampled.plus(counts.since(before))
        self._told[metrics.source] = counts

    def figures(self, *, trajectories: int, tokens: float, reward_sum: float) -> dict[str, float]:
        """Take note of a step that trained on so much; return figures over the latest steps.

        `selection/length_ratio` is the mean number of sampled tokens in a trajectory that was trained on over
        that of all which were sampled, `selection/reward_shift` the difference of the mean rewards. A figure
        is left out while a side has no trajectory."""
        consumed = SampledCounts(trajectories, round(tokens), trajectories, reward_sum)
        self._steps.append((consumed, self._sampled))
        self._sampled = NOTHING
        trained, sampled = NOTHING, NOTHING
        for of_step, before_it in self._steps:
            trained, sampled = trained.plus(of_step), sampled.plus(before_it)
        found = {}
        if trained.tokens and sampled.tokens:
            length = sampled.tokens / sampled.trajectories
            found["selection/length_ratio"] = trained.tokens / trained.trajectories / length
        if trained.rewarded and sampled.rewarded:
            mean = sampled.reward_sum / sampled.rewarded
            found["selection/reward_shift"] = trained.reward_sum / trained.rewarded - mean
        return found


LOG_EVERY_S = 10.0
"""Shortest time between two lines of the log that tell of a step."""
LOGGED = ("reward/mean", "train/loss", "train/grad_norm", "staleness/max_versions", "time/step_s")
"""Numbers of a step that its line has, as far as there are any."""


class StepReporter:
    """Publishes the numbers of each step, logs those of a step from time to time, and warns of those that
    leave their range."""

    def __init__(
        self, bus: Bus, incarnation: str, tasks: asyncio.TaskGroup, diagnostics: DiagnosticsConfig
    ) -> None:
        """Publish in `tasks`, so that no step waits for the bus."""
        self._bus = bus
        self._events = Publisher(bus)
        self._incarnation = incarnation
        self._tasks = tasks
        self._range_warnings = RangeWarnings(diagnostics)
        self._named_figures = NamedFigures()
        self._selection: SelectionBias | None = None
        """Comparison with what actors sample, from the first step of reinforcement learning on."""
        self._log_at = 0.0
        """Monotonic time from which on the next step has a line in the log."""

    def report(self, stage: str, step: int, values: dict[str, Json]) -> None:
        """Tell of a step of `stage`, which is `warmup` or `rl`."""
        if stage == "rl":
            values = self._named_figures.bounded({**values, **self._selection_figures(values)})
        self._bus.state.metrics = values
        if stage == "rl":
            self._range_warnings.look(step, values)
        if time.monotonic() >= self._log_at:
            self._log_at = time.monotonic() + LOG_EVERY_S
            shown = {name.partition("/")[2]: values[name] for name in LOGGED if name in values}
            log.info("step_trained", stage=stage, step=step, **shown)
        metrics = Metrics(
            source="learner", step=step, time_s=time.time(), values={"train/stage": stage, **values}
        )
        name = f"metrics-{self._incarnation}-{stage}-{step}"
        self._tasks.create_task(self._publish(name, encode(metrics)), name=f"publish {name}")

    def _selection_figures(self, values: dict[str, Json]) -> dict[str, float]:
        if self._selection is None:
            self._selection = SelectionBias()
            listening = self._bus.listen(self._bus.subject(COUNTERS), Metrics, self._selection.hear)
            self._tasks.create_task(listening, name="hear actors' counters")
        trajectories = integer(values, "train/trajectories")
        return self._selection.figures(
            trajectories=trajectories,
            tokens=number(values, "train/response_tokens_mean") * trajectories,
            reward_sum=number(values, "reward/mean") * trajectories,
        )

    async def _publish(self, name: str, metrics: bytes) -> None:
        """Publish, or say that it failed: only screens miss them."""
        try:
            await self._events.publish(self._bus.subject("events", "metrics"), metrics, message_id=name)
        except BusError as error:
            log.warning("metrics_not_published", name=name, reason=str(error))


def step_values(result: StepResult) -> dict[str, Json]:
    return {
        "train/loss": result.loss,
        "train/grad_norm": result.grad_norm,
        "train/lr": result.lr,
        "train/response_tokens": result.tokens,
        "train/computed_tokens": result.computed_tokens,
        "train/left_out_tokens": result.left_out_tokens,
        "train/computed_per_trained": (
            result.computed_tokens / max(1, result.tokens - result.left_out_tokens)
        ),
        "train/skipped": result.skipped,
        **{f"policy/{name}": value for name, value in result.diagnostics.items()},
        **{f"critic/{name}": value for name, value in result.critic.items()},
        **result.pairs,
        **{f"time/{name}": value for name, value in result.seconds.items()},
    }


def batch_values(batch: StepBatch) -> dict[str, Json]:
    return {
        "reward/mean": batch.reward_mean,
        "reward/equal_groups_fraction": batch.equal_groups / max(1, batch.groups),
        "reward/zero_fraction": batch.zero_rewards / max(1, batch.trajectories),
        **batch.outcomes.figures,
        "staleness/max_versions": batch.staleness_max,
        "staleness/mean_versions": batch.staleness_mean,
        "staleness/queued_mean_versions": batch.queued_mean,
        "staleness/generation_mean_versions": batch.staleness_mean - batch.queued_mean,
        "rollout/completed_fraction": batch.completed / max(1, batch.trajectories),
        "rollout/cut_off_fraction": batch.cut_off_tokens / max(1, batch.response_tokens),
        "train/trajectories": batch.trajectories,
        "train/tokens": batch.tokens,
        "train/untrainable_trajectories": batch.untrainable,
        "train/untrusted_trajectories": batch.untrusted,
        "train/response_tokens_mean": batch.response_tokens_mean,
    }


def read_values(read: Mapping[str, int]) -> dict[str, Json]:
    """Return how many trajectories rank 0 has read so far, and how many bytes of tokens, by each way."""
    ways = ("mapped", "mapped_bytes", "bus", "bus_bytes")
    return {f"replay/read_{way}": read.get(way, 0) for way in ways}
