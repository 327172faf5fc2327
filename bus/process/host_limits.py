"""Cores and memory that this process may use, and whether the kernel killed a process for lack of memory."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path("/")
"""Where `proc` and `sys` are mounted."""
MEMORY_LIMITS = ("memory.max", "memory.limit_in_bytes")
"""Files with the limit of a cgroup, of the kernel's two versions of cgroups."""
MEMORY_KILLS = ("memory.events", "memory.oom_control")
"""Files with the number of processes of a cgroup that were killed for lack of memory."""

LEAST_BYTES = 20_000_000
"""Size of a model's weights from which on several threads compute it sooner than one."""


class MemoryKills:
    """How many processes the kernel has killed for lack of memory since this object was made."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._before = _killed(root)

    def ending(self, status: int, remedy: str = "") -> str:
        """Describe how a child of ours ended, by its exit status, negative for a signal.

        A SIGKILL is the kernel's where its counters have grown; then `remedy` tells what makes a process of
        this kind smaller."""
        if status >= 0:
            return f"status {status}"
        named = f"signal {signal.Signals(-status).name}"
        own, host = (now - before for now, before in zip(_killed(self._root), self._before, strict=True))
        if -status != signal.SIGKILL or not (own or host):
            return named
        whose = "it" if own else "a process of this host"
        also = f"{remedy}, or " if remedy else ""
        return (
            f"{named}, when the kernel killed {whose} for lack of memory: {also}give it more (end other "
            "programs, or raise the memory limit of the container)"
        )


def memory_bytes(root: Path = ROOT) -> int:
    """Return how much memory this process may use at most: that of the host, or the limit of its cgroup."""
    limits = (_number(group / name) for group in own_groups("memory", root) for name in MEMORY_LIMITS)
    of_host: int = psutil.virtual_memory().total
    return min([of_host, *(limit for limit in limits if limit)])


def usable_cores(root: Path = ROOT) -> int:
    """Return how many cores this process may use: those that it may run on, or the quota of its cgroup."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([cores, *(max(1, int(quota)) for quota in _quotas(root))])


def cpu_threads(chosen: int | None, model_bytes: int, *, processes: int = 1) -> int:
    """Return the number that settings name, or this process's share of the cores for a model whose weights
    have this size, and which `processes` of this host compute alike."""
    if chosen is not None:
        return chosen
    return 1 if model_bytes < LEAST_BYTES else max(1, usable_cores() // processes)


def kills_in_group(group: Path) -> int:
    """Return how many processes of a cgroup the kernel has killed for lack of memory, of the host or a group;
    0 where the group counts none."""
    return sum(_kills_in(group / name) for name in MEMORY_KILLS)


def _quotas(root: Path) -> Iterator[float]:
    for group in own_groups("cpu", root):
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if quota.isdecimal():
            yield int(quota) / int(period)
        if (older := _number(group / "cpu.cfs_quota_us")) is not None:
            yield older / (_number(group / "cpu.cfs_period_us") or older)


def _killed(root: Path) -> tuple[int, int]:
    """Return the kernel's counts of processes that it killed for lack of memory: in this process's cgroups,
    and on this host."""
    own = sum(kills_in_group(group) for group in own_groups("memory", root))
    return own, _kills_in(root / "proc/vmstat")


def _kills_in(file: Path) -> int:
    lines = (line.split() for line in _text(file).splitlines())
    return sum(int(number) for name, number in lines if name == "oom_kill")


def own_groups(kind: str, root: Path = ROOT) -> list[Path]:
    """Return the directories of the cgroups that limit `kind` for this process; in a container its own path
    may lead nowhere, and the limits are those of the mounted root."""
    found = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds and kind not in kinds.split(","):
            continue
        mounted = root / "sys/fs/cgroup" / (kind if kinds else "")
        if not kinds and not (mounted / "cgroup.controllers").exists():  # none of version 2 are mounted here
            continue
        own = mounted / path.lstrip("/")
        found.append(own if own.is_dir() else mounted)
    return found


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _number(file: Path) -> int | None:
    """Return the number that is all of a file of the kernel; None where it is missing, `max` or -1."""
    text = _text(file)
    return int(text) if text.isdecimal() else None
