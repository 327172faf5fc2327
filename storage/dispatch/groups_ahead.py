"""How many groups are issued ahead of the next step: what keeps the learner from waiting, and no more.

When a step is done, the groups of the next one should be complete. What is complete besides only grows old
until it is trained on, whatever the speed of generation, its lengths and their spread.
"""

from math import ceil
from statistics import pstdev

from storage.settings.admission import AdmissionConfig

STEPS = 8
"""Steps that are looked at before fewer groups are issued, at first."""
MOST_STEPS = 64
MARGIN = 2.0
"""Standard deviations of what is left over that stay left over; one group at least."""


class GroupsAhead:
    """Lowers the number of groups ahead while some are left over, and raises it when a step lacks some."""

    def __init__(self, config: AdmissionConfig) -> None:
        """Begin with all that the staleness bound allows, as after every start of storage."""
        self._follows_need = config.ahead == "need"
        self._most = config.max_staleness * config.groups_per_step
        self.groups = self._most
        self._groups_per_step = config.groups_per_step
        self._steps = STEPS
        self._settling = 0
        """Steps that still train on what an earlier number of groups brought."""
        self._left_over: list[int] = []

    def step_done(self, left_over: int) -> None:
        """Take note of how many complete groups there are besides the next step's; of how many it lacks, as a
        negative number."""
        if not self._follows_need:
            return
        if left_over < 0:
            if self.groups < self._most and not self._settling:
                self._steps = min(2 * self._steps, MOST_STEPS)  # it was lowered too far: do it less often
            self._set(min(self._most, self.groups - left_over))
        elif self._settling:
            self._settling -= 1
        else:
            self._left_over.append(left_over)
            if len(self._left_over) == self._steps:
                surplus = min(self._left_over) - max(1.0, MARGIN * pstdev(self._left_over))
                self._set(max(0, self.groups - max(0, int(surplus))))

    def _set(self, groups: int) -> None:
        if groups != self.groups:
            self._settling = ceil(max(groups, self.groups) / self._groups_per_step) + 1
        self.groups = groups
        self._left_over = []
