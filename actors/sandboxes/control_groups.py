"""Control groups of the kernel's, in which an actor bounds or counts what its sandboxes and programs use."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Literal, Self

from actors.sandboxes.owner import is_orphan, this_process
from bus.process.host_limits import own_groups

PREFIX = "sluice-sandbox-"
"""Beginning of the names of groups, which the owner of one follows."""
REMEDY = "run the actor as root, or by systemd-run --user with -p Delegate=yes and -p DelegateSubgroup=actor"
Controller = Literal["cpu", "memory"]


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """One group: what joins it, and what that starts, are bounded and counted together."""

    path: Path

    def joining(self) -> FileIO:
        """Return the file by which a process joins that writes 0 to it, whatever rights it has by then.
        Raises OSError."""
        return FileIO(self.path / "cgroup.procs", "w")

    def remove(self) -> None:
        """Remove the group, unless a process is left in it; then the next actor does that."""
        with suppress(OSError):
            self.path.rmdir()


class ControlGroups:
    """Makes groups below one that this process may change."""

    def __init__(self, above: Path, prepare: Callable[[Path], None]) -> None:
        """Remove what dead actors have left. Raises OSError where this process may make no groups here, or
        `prepare` refuses the directory of one that was made."""
        self._above = above
        for path in above.glob(f"{PREFIX}*"):
            if is_orphan(path.name.removeprefix(PREFIX).rpartition("-")[0]):
                ControlGroup(path).remove()
        tried = self.made(prepare)
        try:
            tried.joining().close()
        finally:
            tried.remove()

    @classmethod
    def found(cls, controller: Controller, prepare: Callable[[Path], None]) -> Self:
        """Return groups of a controller that this process may make. Raises OSError where it may make none."""
        refused = OSError(f"no control groups of the controller {controller} are mounted")
        for above in _candidates(controller):
            try:
                return cls(above, prepare)
            except OSError as error:
                refused = error
        raise refused

    def made(self, prepare: Callable[[Path], None]) -> ControlGroup:
        """Make a group, and have `prepare` write its limits. Raises OSError."""
        path = self._above / f"{PREFIX}{this_process()}-{secrets.token_hex(8)}"
        path.mkdir()
        try:
            prepare(path)
        except OSError:
            path.rmdir()
            raise
        return ControlGroup(path)


def _candidates(controller: Controller) -> Iterator[Path]:
    """Yield the groups below which others may be made: of version 1, or of version 2 its own and the next
    one above, which must hold no processes itself."""
    for own in own_groups(controller):
        if not (own / "cgroup.controllers").exists():  # the hierarchy is of version 1
            yield own
            continue
        for above in (own, own.parent) if (own.parent / "cgroup.controllers").exists() else (own,):
            with suppress(OSError):  # the controller may be there, and else making a group says why not
                (above / "cgroup.subtree_control").write_text(f"+{controller}")
            yield above
