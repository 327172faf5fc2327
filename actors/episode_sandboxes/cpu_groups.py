"""Control groups of the kernel's, which hold the sandboxes of this host to their processors."""

import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Self

import structlog

from actors.episode_sandboxes.owner import is_orphan, this_process
from actors.episodes.errors import ToolError

log = structlog.get_logger()
MOUNT = Path("/sys/fs/cgroup")
OF_THIS_PROCESS = Path("/proc/self/cgroup")
PREFIX = "sluice-sandbox-"
"""Beginning of the names of groups, which the owner of one follows."""
PERIOD_US = 100_000


@dataclass(frozen=True, slots=True)
class CpuGroup:
    """One group: what joins it, and what that starts, share its processors."""

    path: Path

    def joining(self) -> FileIO:
        """Return the file by which a process joins that writes 0 to it, whatever rights it has by then.

        Raises OSError."""
        return FileIO(self.path / "cgroup.procs", "w")

    def remove(self) -> None:
        """Remove the group, unless a process is left in it; then the next actor does that."""
        with suppress(OSError):
            self.path.rmdir()


class CpuGroups:
    """Makes groups below one that this process may change."""

    def __init__(self, above: Path) -> None:
        """Remove what dead actors have left. Raises OSError where this process may make no groups here."""
        self._above = above
        for path in above.glob(f"{PREFIX}*"):
            if is_orphan(path.name.removeprefix(PREFIX).rpartition("-")[0]):
                path.rmdir()
        tried = self._made(1.0)
        try:
            tried.joining().close()
        finally:
            tried.remove()

    @classmethod
    def found(cls) -> Self | None:
        """Return those of this process; None, and a log line, where it may make none."""
        reason: object = "no control groups for processors are mounted"
        for above in _candidates():
            try:
                return cls(above)
            except OSError as error:
                reason = error
        log.warning(
            "sandboxes_are_not_limited", limits=["cpus"], reason=str(reason),
            remedy="run the actor as root, or by systemd-run --user with -p Delegate=yes and "
            "-p DelegateSubgroup=actor; until then the actor goes before its sandboxes",
        )  # fmt: skip
        return None

    def made(self, cpus: float) -> CpuGroup:
        """Make a group. Raises ToolError."""
        try:
            return self._made(cpus)
        except OSError as error:
            raise ToolError(f"a sandbox gets no cpus={cpus:g} of this host: {error}") from error

    def _made(self, cpus: float) -> CpuGroup:
        path = self._above / f"{PREFIX}{this_process()}-{secrets.token_hex(8)}"
        path.mkdir()
        try:
            quota = f"{cpus * PERIOD_US:.0f}"
            if (path / "cpu.max").exists():  # version 2
                (path / "cpu.max").write_text(f"{quota} {PERIOD_US}")
            else:
                (path / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (path / "cpu.cfs_quota_us").write_text(quota)
        except OSError:
            path.rmdir()
            raise
        return CpuGroup(path)


def _candidates() -> Iterator[Path]:
    """Yield the groups below which others may be made: of version 1, or of version 2 its own and the next
    one above, which must hold no processes itself."""
    for line in OF_THIS_PROCESS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            own = MOUNT / "cpu" / path.lstrip("/")
            yield own if own.exists() else MOUNT / "cpu"  # a container sees its own group as the first
        elif not controllers and (MOUNT / "cgroup.controllers").exists():
            own = MOUNT / path.lstrip("/")
            for above in (own, own.parent):
                with suppress(OSError):  # it may be there already, and else making a group says why not
                    (above / "cgroup.subtree_control").write_text("+cpu")
                yield above
