"""Says which process started a sandbox that outlives it, and whether that process is gone.

A process holds a name among the sockets of its network. The kernel frees the name when the process ends,
however that comes about. Containers of a pod share that network, which stays when one of them is started
again: ids of processes say nothing there, since each container counts its own."""

import errno
import secrets
import socket
from functools import cache
from hashlib import blake2b
from pathlib import Path

OWNER = "sluice.owner"
"""Label of a sandbox with what `this_process` returns."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")


def this_process() -> str:
    """Return which process this is, in letters that every service takes in a label."""
    return f"{_network()}-{_held()}"


def is_orphan(owner: str) -> bool:
    """Return whether the process of this network that started a sandbox is gone; others are not known."""
    network, _, token = owner.partition("-")
    if network != _network():
        return False
    with socket.socket(socket.AF_UNIX) as tried:
        try:
            tried.bind(_name(token))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


@cache
def _held() -> str:
    """Return what tells this process from others, and hold the name by which they know that it lives."""
    token, held = secrets.token_hex(8), socket.socket(socket.AF_UNIX)
    held.bind(_name(token))
    held.detach()  # open until this process ends
    return token


def _name(token: str) -> str:
    return f"\0sluice-owner-{token}"


def _network() -> str:
    """Return what tells apart networks of hosts and pods: sockets of others are not seen here."""
    seen = (socket.gethostname(), BOOT.read_text(), str(NETWORK.stat().st_ino))
    return blake2b("\n".join(seen).encode(), digest_size=8).hexdigest()
