"""What the process that starts programs is asked for; travels to it as JSON.

Read by a process that loads nothing but the standard library and this room."""

import json
from dataclasses import asdict, dataclass
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRequest:
    """One program, and what it may reach and use."""

    command: tuple[str, ...]
    variables: dict[str, str]
    directory: str
    """Where it works and what it may write."""
    user: tuple[int, int] | None = None
    """User and group that it runs as; None keeps those of the actor."""
    namespaces: bool = True
    """Whether it gets processes, users and mounts of its own."""
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

    def to_json(self) -> bytes:
        """Return the request as bytes for `from_json`."""
        return json.dumps(asdict(self)).encode("utf-8", "surrogateescape")

    @classmethod
    def from_json(cls, raw: bytes) -> Self:
        """Return the request that `to_json` wrote."""
        fields = json.loads(raw.decode("utf-8", "surrogateescape"))
        for name in ("command", "readable", "writable", "covered"):
            fields[name] = tuple(fields[name])
        fields["user"] = tuple(fields["user"]) if fields["user"] else None
        return cls(**fields)
