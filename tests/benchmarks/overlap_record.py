"""Tells what `launch bench overlap` reads of a run: the steps of its learner, the counters of its actors."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Self

import numpy as np

from bus.errors import SluiceError
from storage.disk.run_directory import RunDirectory
from storage.metrics.records import Record, integer, is_counters, number, older, read_records


@dataclass(frozen=True)
class Turn:
    """Steps in one mode: from the end of step `first` to the end of step `last`."""

    mode: str
    first: int
    last: int
    after: int = 0
    """The last step before the mode was changed to: those up to `first` settled it."""
    began_s: float = 0.0
    """Says when it was changed to, in seconds since the bench began."""
    cut: bool = False
    """Says whether it was to have more steps."""

    @property
    def steps(self) -> range:
        """Return the steps that count."""
        return range(self.first + 1, self.last + 1)


@dataclass
class Heard:
    """The records that a run has written so far."""

    steps: dict[int, Record]
    """Records of the learner's steps, by number."""
    readings: list[Record]
    """Records of the actors' process, in order of time."""

    @classmethod
    def of(cls, run: RunDirectory) -> Self:
        """Read the run's record. Raises `SluiceError` when learner or actors were started again."""
        heard = cls({}, [])
        files = (run.metrics, older(run.counters), run.counters)
        for record in chain.from_iterable(map(read_records, files)):
            if record.get("train/stage") == "rl":
                step = integer(record, "step")
                if heard.steps.setdefault(step, record) != record:  # equal ones are one, sent twice
                    raise SluiceError(f"step {step} was trained twice, so the learner died: see {run.logs}")
            elif is_counters(record):
                heard.readings.append(record)
        sources = {str(reading["source"]) for reading in heard.readings}
        if len(sources) > 1:
            raise SluiceError(f"actors were started again ({', '.join(sorted(sources))}): see {run.logs}")
        heard.readings.sort(key=lambda reading: number(reading, "time_s"))
        return heard

    @property
    def step(self) -> int:
        """Return the latest step; 0 before the first."""
        return max(self.steps, default=0)

    @property
    def engines(self) -> int:
        """Return how many the actors have."""
        return integer(self.readings[-1], "engine/count")

    def ended_s(self, step: int) -> float:
        """Return when a step ended, in seconds since the epoch."""
        return number(self.steps[step], "time_s")

    def has_read_after(self, step: int) -> bool:
        """Return whether the actors have sent their counters since the end of a step."""
        return bool(self.readings) and number(self.readings[-1], "time_s") >= self.ended_s(step)

    def has_read_before(self, step: int) -> bool:
        """Return whether the actors had sent their counters by the end of a step."""
        return bool(self.readings) and number(self.readings[0], "time_s") <= self.ended_s(step)

    def counted(self, name: str, turn: Turn) -> float:
        """Return how much a counter of the actors grew in a turn."""
        span = self.ended_s(turn.first), self.ended_s(turn.last)
        times, values = ([number(reading, key) for reading in self.readings] for key in ("time_s", name))
        began, ended = np.interp(span, times, values)
        return float(ended - began)

    def step_s(self, steps: Sequence[int]) -> list[float]:
        """Return the seconds that each took, waiting included, by the learner's clock."""
        return [round(number(self.steps[step], "time/step_s"), 3) for step in steps if step in self.steps]
