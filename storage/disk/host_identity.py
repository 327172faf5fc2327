"""Identity of the machine that a process runs on."""

import platform
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_identity() -> str:
    """Return the identity of this machine since its last boot; "" (no files are shared) if it has none.
    Containers on one machine have different identities."""
    try:
        return f"{BOOT_ID.read_text().strip()} {platform.node()}"
    except OSError:
        return ""
