"""Control groups that hold the sandboxes of this host to their processors."""

from functools import partial
from pathlib import Path
from typing import Self

import structlog

from actors.episodes.errors import ToolError
from actors.sandboxes.control_groups import REMEDY, ControlGroup, ControlGroups

log = structlog.get_logger()
PERIOD_US = 100_000


class CpuGroups:
    """Makes a group for each sandbox."""

    def __init__(self, groups: ControlGroups) -> None:
        self._groups = groups

    @classmethod
    def found(cls) -> Self | None:
        """Return the groups of this process; None, and a log line, where it may make none."""
        try:
            return cls(ControlGroups.found("cpu", partial(_hold, cpus=1.0)))
        except OSError as error:
            log.warning(
                "sandboxes_are_not_limited", limits=["cpus"], reason=str(error),
                remedy=f"{REMEDY}; until then the actor goes before its sandboxes",
            )  # fmt: skip
            return None

    def made(self, cpus: float) -> ControlGroup:
        """Make a group. Raises ToolError."""
        try:
            return self._groups.made(partial(_hold, cpus=cpus))
        except OSError as error:
            raise ToolError(f"a sandbox gets no cpus={cpus:g} of this host: {error}") from error


def _hold(group: Path, cpus: float) -> None:
    quota = f"{cpus * PERIOD_US:.0f}"
    if (group / "cgroup.controllers").exists():  # version 2
        (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
    else:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(quota)
