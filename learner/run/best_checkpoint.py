"""Tells which evaluated version is best by a score, and which checkpoints stay on the disk for that."""

from bus.evaluation_messages import EvaluationResult
from learner.progress.progress import Best, Progress
from storage.settings.evaluation import ALWAYS, HELD_OUT


class BestCheckpoint:
    """Follows one score of one data set. What it knows is part of the progress, and so of checkpoints."""

    def __init__(self, metric: str | None, progress: Progress, *, warms_up: bool) -> None:
        """Follow `metric`, written `set/score`, or none. Results that another learner awaited never come.

        Args:
            metric: names a data set and one of its scores.
            progress: of the learner, which this changes.
            warms_up: whether the run has a supervised stage, whose first version no checkpoint holds.
        """
        self._metric = metric
        self._progress = progress
        self._warms_up = warms_up
        self.asks_again = metric is not None and progress.step in progress.awaited
        """Whether a result of the version that the learner resumed from was awaited, and is to be asked for
        again."""
        progress.awaited = []
        if metric is None or (progress.best is not None and progress.best.metric != metric):
            progress.best = None  # what was best by another score says nothing of this one

    def asked(self, policy_version: int) -> None:
        """The version is evaluated: its checkpoint stays until the result says whether it is best."""
        step = self._step(policy_version)
        if self._metric is not None and step >= 0:
            self._progress.awaited = sorted({*self._progress.awaited, step})

    def keeps(self, step: int) -> bool:
        """Return whether the checkpoint of a step is kept, and so has to be written."""
        return step in self._progress.kept

    def on_result(self, result: EvaluationResult) -> None:
        """Take note of a result, of whatever data set. Of equal ones the first stays best."""
        name, _, score = (self._metric or "").partition("/")
        step, progress = self._step(result.policy_version), self._progress
        if (result.data_set or HELD_OUT) != name or step not in progress.awaited:
            return
        progress.awaited = [awaited for awaited in progress.awaited if awaited != step]
        found = getattr(result, score) if score in ALWAYS else result.scores.get(score)
        if found is not None and (progress.best is None or found > progress.best.value):
            progress.best = Best(str(self._metric), found, result.policy_version, step)

    def _step(self, policy_version: int) -> int:
        """Return the step that made a version; it is negative before reinforcement learning."""
        progress = self._progress
        begins = int(self._warms_up) if progress.stage == "warmup" else progress.trains_from
        return policy_version - begins
