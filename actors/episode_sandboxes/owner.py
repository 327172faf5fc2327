"""Says which process started a sandbox that outlives it, and whether that process is gone."""

import os
import socket
from hashlib import blake2b
from pathlib import Path

import psutil

OWNER = "sluice.owner"
"""Label of a sandbox with what `this_process` returns."""
BOOT = Path("/proc/sys/kernel/random/boot_id")


def this_process() -> str:
    """Return which process this is, in letters that every service takes in a label."""
    return f"{_host()}-{os.getpid()}-{psutil.Process().create_time():.0f}"


def is_orphan(owner: str) -> bool:
    """Return whether the process of this host that started a sandbox is gone; others are not known here."""
    host, _, process = owner.partition("-")
    if host != _host():
        return False
    pid, began = process.split("-")
    try:
        return bool(abs(psutil.Process(int(pid)).create_time() - int(began)) > 1)
    except psutil.NoSuchProcess:
        return True


def _host() -> str:
    """Return what tells apart hosts, containers and boots: process ids of others mean nothing here."""
    seen = (socket.gethostname(), BOOT.read_text(), str(Path("/proc/self/ns/pid").stat().st_ino))
    return blake2b("\n".join(seen).encode(), digest_size=8).hexdigest()
