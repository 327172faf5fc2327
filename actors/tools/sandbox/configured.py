"""The sandbox of a configuration."""

import sys
from pathlib import Path

from actors.settings.tools import SandboxConfig
from actors.tools.sandbox.limits import Limits
from actors.tools.sandbox.sandbox import Sandbox
from bus.process.plugins import refuse_of_record

MEGABYTE = 1 << 20


def configured_sandbox(config: SandboxConfig, *, output_bytes: int = 1 << 16) -> Sandbox:
    """Start a sandbox. Raises ConfigError where the host allows none, or a package may not be loaded."""
    for name in config.packages:  # importing one runs its code outside of the sandbox's limits
        refuse_of_record(f"the package {name!r}", name)
    limits = Limits(
        wall_s=config.wall_s,
        cpu_s=config.cpu_s,
        memory_bytes=config.memory_mb * MEGABYTE,
        processes=config.processes,
        file_bytes=config.file_mb * MEGABYTE,
        preload=config.packages,
        package_directories=_package_directories() if config.packages else (),
    )
    return Sandbox(limits, at_once=config.at_once, output_bytes=output_bytes)


def _package_directories() -> tuple[str, ...]:
    """Return the directories of installed packages that this process imports from."""
    names = ("site-packages", "dist-packages")
    return tuple(path for path in sys.path if Path(path).name in names and Path(path).is_dir())
