"""The alarm that nothing can be learnt: answers are all too long, worth nothing, or worth the same; or what
is learnt does not hold for other demonstrations."""

from collections import Counter
from collections.abc import Iterator, Mapping
from math import nan

from bus.codec import Json
from storage.metrics.records import integer, number

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
            "each answer was cut off at its longest length",
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
