"""The scores of one data set over the steps of a run, those of undone weights left out."""

from copy import deepcopy

from launch.dashboard.buckets import HEAD, MOST, Buckets, columns, steps_of
from storage.metrics.records import Record, integer, number

NOT_SCORES = {
    *HEAD, "policy_version", "incarnation", "prompts", "seconds", "oldest_version", "newest_version",
    "failed", "data_set", "samples", "lag_versions",
}  # fmt: skip


class ScoreCurves:
    """Results by the step that made the evaluated weights, in any order.

    The latest are kept one by one, so that a step's next result replaces the one before; the others as
    intervals of steps."""

    def __init__(self) -> None:
        self._latest: dict[int, Record] = {}
        self._older = Buckets()

    def add(self, row: Record) -> None:
        """Add a result; an earlier one of the same step was of weights that are undone."""
        self._latest[integer(row, "step")] = row
        if len(self._latest) > 2 * MOST:
            early = [self._latest.pop(step) for step in sorted(self._latest)[:MOST]]
            self._older.add(steps_of(early), columns(early, NOT_SCORES))

    def forget_undone(self, step: Record) -> None:
        """Forget the results of weights that a learner has undone which trained this step again."""
        first, time_s = integer(step, "step"), number(step, "time_s")
        self._older.forget_from(first)
        self._latest = {
            n: row for n, row in self._latest.items() if n < first or number(row, "time_s") > time_s
        }

    @property
    def curves(self) -> Buckets:
        """Return the scores in intervals of steps."""
        found = deepcopy(self._older)
        if self._latest:
            rows = [self._latest[step] for step in sorted(self._latest)]
            found.add(steps_of(rows), columns(rows, NOT_SCORES))
        return found
