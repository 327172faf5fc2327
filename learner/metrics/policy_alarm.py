"""The alarm that engines and learner disagree about the policy: it pauses admission, and ends a run."""

import time

from bus.errors import PolicyMismatchError
from bus.messages import Metrics
from learner.config.diagnostics import DiagnosticsConfig
from storage.metrics.records import integer

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
        """Take note of an actor's counters."""
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
