"""What the process that starts programs is asked for; travels to it as JSON. Read by a process that loads
nothing but the standard library and this room."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRequest:
    """One program, and what it may reach and use."""

    command: tuple[str, ...]
    variables: dict[str, str]
    directory: str
    """Where the program works and what it may write."""
    user: tuple[int, int] | None = None
    """User and group that the program runs as; None keeps those of the actor."""
    namespaces: bool = True
    """Whether the program gets processes, users and mounts of its own."""
    port: int | None = None
    """Port of its own loopback at which the gateway listens; None leaves it the host's network."""
    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    covered: tuple[str, ...] = ()
    """Directories and files in whose place it sees empty ones."""
    cpu_s: int = 3600
    memory_bytes: int = 1 << 33
    processes: int = 4096
    file_bytes: int = 1 << 32
