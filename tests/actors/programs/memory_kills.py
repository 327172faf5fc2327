"""Control groups that are short of memory, in which the kernel really kills."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from actors.sandboxes.control_groups import ControlGroup, ControlGroups
from bus.process.host_limits import MEMORY_LIMITS, kills_in_group

HOG = "x = bytearray({bytes})"


@contextmanager
def short_of_memory(limit_mb: int) -> Iterator[ControlGroup]:
    """Yield a group that may take this much, below which others may be made; skip without such groups."""

    def limit(path: Path) -> None:
        [file] = [path / name for name in MEMORY_LIMITS if (path / name).exists()]
        file.write_text(str(limit_mb << 20))

    try:
        group = ControlGroups.found("memory", limit).made(limit)
    except OSError as error:
        pytest.skip(f"needs control groups of memory: {error}")
    try:
        yield group
    finally:
        group.path.rmdir()


async def taking(group: ControlGroup, megabytes: int) -> int:
    """Take memory in a group; return the status of the process that does."""
    join = f'echo 0 > {group.path}/cgroup.procs && exec "$@"'
    script = HOG.format(bytes=megabytes << 20)
    process = await asyncio.create_subprocess_exec("sh", "-c", join, "sh", sys.executable, "-S", "-c", script)
    return await process.wait()


async def killed_elsewhere() -> None:
    """Have the kernel kill a process for lack of memory that no program has to do with."""
    with short_of_memory(20) as group:
        assert await taking(group, 200) == -9
        assert kills_in_group(group.path) > 0
