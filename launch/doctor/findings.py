"""What a check of this host finds: a line in words, and what to do about it."""

import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from bus.codec import Json
from bus.errors import BusError, ConfigError

FindingLevel = Literal["ok", "warning", "error"]
WIDTH = 100
INDENT = " " * 23
LONGEST_REASON = 300
"""Characters of an error's text in a finding."""


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    check: str
    level: FindingLevel
    """`ok`; `warning`: a run starts, and may be slow or wrong later; `error`: a run cannot start."""
    found: str
    remedy: str = ""
    """What to do, for everything that is not ok."""

    def __str__(self) -> str:
        head = f"{self.level:<8} {self.check:<13} {self.found}"
        lines = textwrap.wrap(head, WIDTH, subsequent_indent=INDENT, break_on_hyphens=False)
        if self.remedy:
            lines += textwrap.wrap(
                f"-> {self.remedy}", WIDTH, initial_indent=INDENT, subsequent_indent=f"{INDENT}   ",
                break_on_hyphens=False, break_long_words=False,
            )  # fmt: skip
        return "\n".join(lines)

    def to_json(self) -> dict[str, Json]:
        return asdict(self)


def refused(check: str, error: ConfigError | BusError, remedy: str) -> Finding:
    """Return a refusal as a finding. Its text ends with a remedy; `remedy` is for one without."""
    found, _, own = str(error).rpartition(": ")
    return Finding(check, "error", found or own, own if found else remedy)


def brief(error: Exception) -> str:
    """Return what an error says, or what it is, on one line of 300 characters at most."""
    return " ".join(str(error).split())[:LONGEST_REASON] or type(error).__name__


def worst(findings: Iterable[Finding]) -> FindingLevel:
    levels = {finding.level for finding in findings}
    return "error" if "error" in levels else "warning" if "warning" in levels else "ok"
