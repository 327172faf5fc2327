"""Which processes of this host have a file open, such as the lock of a run."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from pwd import getpwuid

import psutil


def processes_holding(files: Iterable[Path]) -> dict[Path, list[int]]:
    """Return, by file, the processes of this host that have it open, as far as this user may see them. Unlike
    an attempt to lock a file it cannot get into the way of a process that is about to."""
    wanted = {os.path.realpath(file): file for file in files}
    found: dict[Path, list[int]] = {file: [] for file in wanted.values()}
    for process in psutil.process_iter() if wanted else ():
        try:
            opened = {file.path for file in process.open_files()}
        except psutil.Error:  # the process has just ended, or is another user's
            continue
        for path in opened & wanted.keys():
            found[wanted[path]].append(process.pid)
    return found


def hidden_owner(path: Path) -> str | None:
    """Return the user whose processes may have files below `path` open without `processes_holding` seeing it.
    That is its owner, if this user is another one and not root; None for a path that does not exist."""
    try:
        owner = path.stat().st_uid
    except FileNotFoundError:
        return None
    if os.geteuid() in (0, owner):
        return None
    with suppress(KeyError):  # a user of another host, on a shared disk, or of none
        return getpwuid(owner).pw_name
    return f"user {owner}"
