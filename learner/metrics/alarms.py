"""Alarms: nothing can be learnt, since answers are all too long, worth nothing or worth the same; what is
learnt does not hold for other demonstrations; or engines and learner disagree about the policy, which pauses
admission, and ends a run."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from math import nan

from bus.codec import Json
from bus.errors import PolicyMismatchError
from bus.messages import Metrics
from learner.config.diagnostics import DiagnosticsConfig
from storage.metrics.records import integer, number

PROBE_ALARMS = "engine/probe_alarms"
"""Counter of an actor: how many of its engines the probe finds to be wrong now."""
SILENT_S = 300.0
"""Time after which nothing is known any more of an actor that says nothing."""


class PolicyAlarm:
    """Counts the steps in a row at which engines and learner disagree about the policy.

    They do where `policy/mismatch_nats` of a step is above its bound, and where the probe finds an engine to
    be wrong. A step that trains on no token of its own version measures no mismatch."""

    def __init__(self, config: DiagnosticsConfig) -> None:
        self._config = config
        self._probes: dict[str, tuple[float, int]] = {}
        """When an actor was heard last, and how many of its engines are wrong, by its name."""
        self._mismatch = ""
        """How far the latest measured mismatch is above its bound, in words."""
        self._reason = ""
        self._in_a_row = 0

    def hear(self, metrics: Metrics) -> None:
        self._probes[metrics.source] = (time.monotonic(), integer(metrics.values, PROBE_ALARMS))

    def look(self, mismatch_nats: float | None) -> None:
        """Count a step with this mismatch; `None` where none was measured."""
        bound = self._config.largest_mismatch_nats
        if mismatch_nats is not None:
            is_outside = bound is not None and not mismatch_nats <= bound  # NaN is above every bound
            self._mismatch = (
                f"policy/mismatch_nats is {mismatch_nats:.3g}, above {bound:g}" if is_outside else ""
            )
        wrong = self._wrong_engines()
        self._reason = "; ".join(filter(None, (self._mismatch, wrong)))
        if not self._reason:
            self._in_a_row = 0
        elif wrong or mismatch_nats is not None:
            self._in_a_row += 1

    def _wrong_engines(self) -> str:
        now = time.monotonic()
        actors = [name for name, (at_s, wrong) in self._probes.items() if wrong and now - at_s < SILENT_S]
        return f"the probe finds wrong engines of {', '.join(sorted(actors))}" if actors else ""

    @property
    def text(self) -> str:
        """Return what is wrong and what comes of it, in words; empty while nothing is."""
        if not self._in_a_row:
            return ""
        pause, end = self._config.mismatch_pause_steps, self._config.mismatch_end_steps
        paused = "admission is paused" if self.pause_reason else f"admission is paused after {pause}"
        follows = ("" if pause is None else paused, "" if end is None else f"the run ends after {end}")
        return "; ".join(filter(None, (self._disagreement, *follows)))

    @property
    def pause_reason(self) -> str:
        """Return why leases are to be issued for the next step alone; empty where they need not be."""
        pause = self._config.mismatch_pause_steps
        return self._disagreement if pause is not None and self._in_a_row >= pause else ""

    @property
    def _disagreement(self) -> str:
        steps = "1 step" if self._in_a_row == 1 else f"{self._in_a_row} steps in a row"
        return f"engines and learner disagree about the policy, {steps}: {self._reason}"

    def end_run(self) -> None:
        """Raise `PolicyMismatchError` if this has gone on for too many steps."""
        end = self._config.mismatch_end_steps
        if end is not None and self._in_a_row >= end:
            raise PolicyMismatchError(
                f"policy mismatch: {self._disagreement}. Give engines the learner's dtype, temperature and "
                "package versions, and start the run again; or raise "
                "learner.diagnostics.largest_mismatch_nats, actors.probe_bound_nats or "
                "learner.diagnostics.mismatch_end_steps"
            )


STEPS = 3
"""Steps in a row after which it is said."""
PART = "reward_part/"
SEVERAL = "reward/group_std_mean"
"""Metric of a step in which some group has several rewards: those of a single one are always equal."""
PENALTY = "penal"
"""Text in the names of parts that are 0 where all is well."""
FORMAT = "format"
"""Text in the names of those parts of a reward that ask for a form of the answer."""
Told = tuple[str, str]
"""What is wrong, and where to look."""


class LearningAlarm:
    """Counts the steps in a row of which nothing can be learnt, by what their trajectories had in common."""

    def __init__(self) -> None:
        self._in_a_row = Counter[Told]()
        self._last = 0
        self._heldout = nan
        """Latest loss of held-out demonstrations."""
        self._rises = 0
        """Measurements in a row in which it rose."""

    def look_at_heldout(self, loss: float) -> None:
        """Note the loss of held-out demonstrations."""
        self._rises = self._rises + 1 if loss > self._heldout else 0
        self._heldout = loss

    def look(self, step: int, values: Mapping[str, Json]) -> None:
        """Count a step with these metrics; one that does not follow the one before begins anew. The stage on
        demonstrations is over then, and with it the alarm of their held-out loss."""
        self._rises = 0
        before = self._in_a_row if step > self._last else Counter[Told]()
        self._last = step
        self._in_a_row = Counter({told: before[told] + 1 for told in _in_common(values)})

    @property
    def text(self) -> str:
        """Return all of `alarms`; empty where there is none."""
        return "; ".join(self.alarms.values())

    @property
    def alarms(self) -> dict[str, str]:
        """Return what the latest steps have in common and where to look, each under a name that stays."""
        told = {
            wrong: f"{wrong} in {n} steps in a row: {look}"
            for (wrong, look), n in self._in_a_row.items()
            if n >= STEPS
        }
        if self._rises >= STEPS:
            told["held-out loss"] = (
                f"the held-out loss rose {self._rises} times in a row, to {self._heldout:.4g}: what is "
                "learned holds for the demonstrations alone; set fewer warmup.steps or a lower "
                "warmup.optimizer.lr"
            )
        return told


def _in_common(values: Mapping[str, Json]) -> Iterator[Told]:
    if not integer(values, "train/trajectories"):
        return
    if number(values, "rollout/too_long_fraction") == 1:
        yield (
            "the last answer of each rollout was cut off at its longest length",
            "raise sampling.max_new_tokens, or see with `launch tail` whether answers end at all",
        )
    if number(values, "reward/zero_fraction") == 1:
        yield (
            "each reward was 0",
            "the tasks are too hard for the policy, or the reward does not read its answers; `launch tail` "
            "shows both",
        )
        return
    if number(values, "reward/equal_groups_fraction") == 1 and SEVERAL in values:
        yield (
            "the rewards within each group were equal",
            "the tasks are too easy or too hard, or the reward does not tell answers apart; `launch tail` "
            "shows them",
        )
    for name in sorted(values):
        asks_for_form = name.startswith(PART) and FORMAT in name.lower() and PENALTY not in name.lower()
        if asks_for_form and number(values, name) == 0:
            yield (
                f"{name.removeprefix(PART)}, a part of the reward, was 0 for each answer",
                "the format that it asks for is never met; `launch tail` shows answers, and the prompt may "
                "show the format",
            )
