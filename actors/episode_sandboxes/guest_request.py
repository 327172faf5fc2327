"""What the process that starts sandboxes in namespaces is asked for; travels to it as JSON. Read by a process
that loads nothing but the standard library and two rooms."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestSettings:
    """What all sandboxes of a process see."""

    shown: tuple[str, ...]
    """Files and directories of the host that are seen read-only, besides its programs."""
    hidden: tuple[str, ...]
    """Files and directories of the host that are not seen, also where what is above them is."""
    variables: dict[str, str]
    links: dict[str, str]
    """Names of directories of a sandbox that lead to others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestLimits:
    """What one sandbox may use; travels as JSON, too."""

    cpu_s: int
    """Processor time of each process."""
    memory_bytes: int
    """Memory of all processes together, and the most that one of them may ask for as data."""
    processes: int
    disk_bytes: int
    """Size of the workspace, of /tmp and of /dev/shm each; they are kept in memory."""
    open_files: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRequest:
    """A command to carry out in one sandbox."""

    words: tuple[str, ...]
    variables: dict[str, str]
    directory: str
    timeout_s: float
