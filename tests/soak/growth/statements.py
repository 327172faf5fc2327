"""What docs/operations.md ("Bounds") states of growth, as numbers for the settings of a compressed run."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from bus.topology import MIB
from soak.growth.settings import RETAIN_BYTES

ABOUT = 1.5
"""Factor by which a figure that is stated as `about` may be exceeded."""
UNSETTLED = 4
"""Bytes of segments in multiples of those retained: some are not settled yet, or are just being merged."""


@dataclass(frozen=True)
class Stated:
    """One sentence of the documentation, and what it allows some series."""

    series: str
    """Regular expression of the names of the series."""
    sentence: str
    """The words of docs/operations.md, which a test looks for there."""
    per: str = "step"
    """What the amount grows by: step, group or evaluation."""
    amount: float = 0.0
    """Growth for each of them; infinite where no figure is stated."""
    at_most: float | None = None
    """Bound of the series, where one is stated instead of a growth."""

    def per_step(self, each_step: Mapping[str, float]) -> float:
        """Return the growth that is allowed in a step, in which there are so many of each."""
        return self.amount if self.amount == inf else ABOUT * self.amount * each_step[self.per]


STATED = (
    Stated("local memory_bytes", "20,000, of about 0.4 KB each: older ones are thinned out", amount=400.0),
    Stated("disk lineage bytes", "about 0.3 KB and 2 KB a step", amount=300.0),
    Stated("disk account bytes", "72 and 144 bytes a trajectory", "group", 2 * 216.0),
    Stated("disk account files", "a file for each start of an actor or a learner", amount=inf),
    Stated("disk metrics bytes", "about 0.3 KB and 2 KB a step", amount=2000.0),
    Stated("disk progress bytes", "about 60 and 300 bytes an evaluation", "evaluation", 60.0),
    Stated("disk ledger bytes", "about 60 bytes a group", "group", 60.0),
    Stated("disk replay/retired bytes", "one file for neighbours, of 50 bytes a segment", amount=50.0),
    Stated("disk data (bytes|files)", "the prompts of each change of the data", amount=inf),
    Stated(
        "disk replay/segment bytes",
        "`replay.retain_bytes`, `replay.retain_age_s`, and those that are not settled yet",
        at_most=UNSETTLED * RETAIN_BYTES,
    ),
    Stated("disk counters bytes", "32 MiB, and as much before it in counters.1.jsonl", at_most=64 * MIB),
    Stated("disk logs bytes", "64 MiB, and as much before it in `<name>.log.1`", at_most=4 * 128 * MIB),
)
"""Series that are not named here may not grow."""
IN_BYTES = re.compile(r"nats (WEIGHTS|FILES|EVENTS|DEAD) messages|disk bus/jetstream files")
"""Series whose bound is stated in bytes: those of the same stream are judged, and these are not."""
NEGLIGIBLE = {
    "memory_bytes": 32.0 * MIB,
    "descriptors": 4.0,
    "threads": 4.0,
    "bytes": 2.0 * MIB,
    "files": 16.0,
    "messages": 64.0,
}
"""Growth over six weeks, by the last word of a series, that costs nothing."""
OTHERWISE_NEGLIGIBLE = 4.0


def negligible(series: str) -> float:
    """Return the growth of a series over six weeks that costs nothing."""
    return NEGLIGIBLE.get(series.rpartition(" ")[2], OTHERWISE_NEGLIGIBLE)


def stated_of(series: str, stream_bounds: Mapping[str, int]) -> Stated:
    """Return what is stated of a series.

    Args:
        series: its name.
        stream_bounds: largest size of each stream in bytes, by its upper-case name.
    """
    bound = "`bus.streams.*_mib`"
    for name, size_bytes in stream_bounds.items():
        if series == f"nats {name} bytes":
            return Stated(re.escape(series), bound, at_most=float(size_bytes))
    if series in ("nats store bytes", "disk bus/jetstream bytes"):
        return Stated(re.escape(series), bound, at_most=float(sum(stream_bounds.values())))
    return next((one for one in STATED if re.fullmatch(one.series, series)), Stated(re.escape(series), ""))


def judged(series: str) -> bool:
    """Return whether a series is judged by itself."""
    return IN_BYTES.fullmatch(series) is None
