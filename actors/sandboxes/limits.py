"""What a program in the sandbox may use, and where its modules are; travels as JSON to the sandbox's process.
Read by a process that loads nothing but the standard library and this room."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one program."""

    wall_s: float = 10.0
    """Time from its start to its end."""
    cpu_s: int = 10
    """Processor time of each of its processes."""
    memory_bytes: int = 1 << 29
    """Address space of each of its processes."""
    processes: int = 1
    open_files: int = 64
    file_bytes: int = 1 << 24
    """Size of one file, and of all of them together."""
    files: int = 256
    """Files and directories in its working directory."""
    preload: tuple[str, ...] = ()
    """Modules loaded once, before any program starts."""
    package_directories: tuple[str, ...] = ()
    """Directories outside the standard library that the program may import from."""

    @property
    def home(self) -> str:
        """Return the directory of a program: /tmp, unless packages lie there, which it would hide."""
        return "/home" if any(path.startswith("/tmp/") for path in self.package_directories) else "/tmp"
