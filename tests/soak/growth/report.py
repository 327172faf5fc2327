"""The report of a compressed run: each series with its growth, extrapolated to six weeks, and a verdict."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite

from rich.console import Console
from rich.table import Table

from bus.codec import Json
from soak.growth.fit import Growth, fit_growth
from soak.growth.samples import Sample
from soak.growth.statements import Stated, judged, negligible, stated_of

SIX_WEEKS_STEPS = 6 * 7 * 86400 // 30
"""Steps of a run of six weeks with one step in 30 s."""
OF_THE_RUN = ("disk", "nats")
"""First words of the series that outlive processes."""
REACHED_SHARE = 0.8
"""Share of its bound from which a series has reached it: the oldest go in blocks."""
QUIET = ("does not grow", "within its bound", "too short to tell")
"""Verdicts that the table leaves out."""
BROKEN = ("grows beyond what is stated", "above its bound")


@dataclass(frozen=True)
class Verdict:
    """What came of one series."""

    series: str
    growth: Growth | None
    largest: float
    """Largest sample of the run."""
    stated: Stated
    stated_by_six_weeks: float
    """Growth over six weeks that the documentation states."""
    words: str

    @property
    def broken(self) -> bool:
        """Return whether the series breaks what is stated."""
        return self.words in BROKEN

    def by_six_weeks(self) -> tuple[float, float, float] | None:
        """Return the growth over six weeks: lower end, estimate, upper end; None without a fit."""
        if self.growth is None:
            return None
        slopes = self.growth.low, self.growth.per_step, self.growth.high
        return slopes[0] * SIX_WEEKS_STEPS, slopes[1] * SIX_WEEKS_STEPS, slopes[2] * SIX_WEEKS_STEPS

    def to_json(self) -> dict[str, Json]:
        """Return the report's entry."""
        extrapolated = self.by_six_weeks()
        return {
            "series": self.series,
            "verdict": self.words,
            "largest": self.largest,
            "fit": None if self.growth is None else asdict(self.growth),
            "by_six_weeks": None if extrapolated is None else list(extrapolated),
            "stated_by_six_weeks": self.stated_by_six_weeks if isfinite(self.stated_by_six_weeks) else None,
            "at_most": self.stated.at_most,
            "statement": self.stated.sentence,
        }


def judge(
    samples: Sequence[Sample], each_step: Mapping[str, float], stream_bounds: Mapping[str, int]
) -> list[Verdict]:
    """Judge every series of a run's samples against what is stated of it.

    Args:
        samples: in the order of time.
        each_step: how many steps and trajectories a step has.
        stream_bounds: largest size of each stream in bytes.
    """
    names = sorted({name for sample in samples for name in sample.values if judged(name)})
    return [_verdict(name, samples, each_step, stream_bounds) for name in names]


def _verdict(
    name: str, samples: Sequence[Sample], each_step: Mapping[str, float], stream_bounds: Mapping[str, int]
) -> Verdict:
    stated = stated_of(name, stream_bounds)
    fitted = [sample for sample in fitted_samples(name, samples) if name in sample.values]
    growth = fit_growth([sample.step for sample in fitted], [sample.values[name] for sample in fitted])
    largest = max(sample.values[name] for sample in samples if name in sample.values)
    allowed = SIX_WEEKS_STEPS * stated.per_step(each_step) if stated.at_most is None else 0.0
    return Verdict(name, growth, largest, stated, allowed, _words(name, growth, largest, stated, allowed))


def fitted_samples(name: str, samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples in which a series is fitted.

    A restart frees what a process holds, so its series are fitted within its longest life, in steps. Those of
    the directory and of the bus are fitted once restarts are over.
    """
    part = name.rpartition(" ")[0]
    if name.split()[0] in OF_THE_RUN:
        return [sample for sample in samples if sample.calm]
    steps: dict[str, list[int]] = {}
    for sample in samples:
        if part in sample.lives:
            steps.setdefault(sample.lives[part], []).append(sample.step)
    longest = max(steps, key=lambda life: steps[life][-1] - steps[life][0])
    return [sample for sample in samples if sample.lives.get(part) == longest]


def _words(name: str, growth: Growth | None, largest: float, stated: Stated, allowed: float) -> str:
    if stated.at_most is not None:
        return _words_of_bound(growth, largest, stated.at_most)
    if growth is None:
        return "too short to tell"
    low, high = growth.low * SIX_WEEKS_STEPS, growth.high * SIX_WEEKS_STEPS
    slack = negligible(name)
    if low > allowed + slack:
        return "grows beyond what is stated"
    if allowed and low > slack:
        return "grows as stated"
    if allowed == inf or high <= allowed + slack:
        return "does not grow" if high <= slack else "grows no more than stated"
    return "too noisy to tell"


def _words_of_bound(growth: Growth | None, largest: float, at_most: float) -> str:
    if largest > at_most:
        return "above its bound"
    still_grows = growth is not None and growth.low > 0
    return (
        "grows towards its bound" if still_grows and largest < REACHED_SHARE * at_most else "within its bound"
    )


def print_report(report: Mapping[str, Json], verdicts: Sequence[Verdict], console: Console) -> None:
    """Print the report as a table for people; what breaks a statement comes first.

    Of the series that do not grow only memory has a row."""
    table = Table(title=f"growth of {report['steps']} steps, extrapolated to {SIX_WEEKS_STEPS} (six weeks)")
    for column in ("series", "first", "last", "by six weeks", "99 % interval", "stated", "verdict"):
        table.add_column(column, justify="left" if column in ("series", "verdict") else "right")
    for verdict in sorted(verdicts, key=lambda one: not one.broken):
        if verdict.words not in QUIET or verdict.series.endswith("memory_bytes"):
            table.add_row(*_row(verdict))
    console.print(table)
    counts = Counter(verdict.words for verdict in verdicts)
    console.print("; ".join(f"{words}: {count}" for words, count in counts.most_common()))
    console.print(
        f"{report['steps']} steps in {report['minutes']} min, {report['evaluations']} evaluations, "
        f"{report['data_switches']} data switches, {report['guests']} actors that came and went, "
        f"{report['restarts']} restarts"
    )


def _row(verdict: Verdict) -> tuple[str, ...]:
    name, growth, extrapolated = verdict.series, verdict.growth, verdict.by_six_weeks()
    if verdict.stated.at_most is not None:
        stated = f"at most {_number(name, verdict.stated.at_most)}"
        if growth is None:
            return name, "", _number(name, verdict.largest), "", "", stated, verdict.words
        ends = _number(name, growth.first), _number(name, growth.last)
        return name, *ends, "", "", stated, verdict.words
    stated = "no figure" if verdict.stated_by_six_weeks == inf else _number(name, verdict.stated_by_six_weeks)
    if growth is None or extrapolated is None:
        return name, "", _number(name, verdict.largest), "", "", stated, verdict.words
    low, middle, high = (_number(name, value) for value in extrapolated)
    ends = _number(name, growth.first), _number(name, growth.last)
    return name, *ends, middle, f"{low} to {high}", stated, verdict.words


def _number(name: str, value: float) -> str:
    """Write a value of a series: bytes in MiB."""
    return f"{value / 2**20:.2f} MiB" if name.endswith("bytes") else f"{value:.4g}"
