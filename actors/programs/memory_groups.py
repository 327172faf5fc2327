"""Control groups that tell whether a host had no memory left for a program, or the program took too much."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import structlog

from actors.sandboxes.control_groups import REMEDY, ControlGroup, ControlGroups
from bus.process.host_limits import kills_in_group, memory_bytes

log = structlog.get_logger()
MOST_TAKEN = ("memory.peak", "memory.max_usage_in_bytes")
"""Files with the most memory that a group has taken, of the kernel's two versions of groups."""


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """Group of one program."""

    group: ControlGroup
    share_bytes: int

    def was_short(self) -> bool:
        """Return whether the kernel killed a process of this program for lack of memory although the program
        took no more than its share: kills elsewhere, and those that it provokes itself, excuse nothing."""
        path = self.group.path
        return kills_in_group(path) > 0 and _most_taken(path) <= self.share_bytes


class MemoryGroups:
    """Makes a group for each program."""

    def __init__(self, groups: ControlGroups, share_bytes: int) -> None:
        self._groups = groups
        self._share_bytes = share_bytes

    @classmethod
    def found(cls, programs: int) -> Self | None:
        """Return groups for this number of programs at once, which share the memory of this process; None,
        and a log line, where it may make none."""
        try:
            return cls(ControlGroups.found("memory", _refuse_uncounted), memory_bytes() // programs)
        except OSError as error:
            log.warning(
                "memory_of_programs_is_not_counted", reason=str(error), remedy=REMEDY,
                consequence="a program that the kernel kills for lack of memory counts as one that failed",
            )  # fmt: skip
            return None

    @contextmanager
    def group(self) -> Iterator[MemoryGroup]:
        """Yield the group of a program, and remove it once nothing of the program is left. Raises OSError."""
        group = self._groups.made(_refuse_uncounted)
        try:
            yield MemoryGroup(group, self._share_bytes)
        finally:
            group.remove()


def _refuse_uncounted(group: Path) -> None:
    _most_taken(group)


def _most_taken(group: Path) -> int:
    """Return the most memory that a group has taken. Raises OSError where the kernel counts none."""
    for name in MOST_TAKEN:
        if (group / name).exists():
            return int((group / name).read_text())
    names = " and no ".join(MOST_TAKEN)
    raise FileNotFoundError(f"{group} has no {names}, which groups of version 2 have from Linux 5.19 on")
