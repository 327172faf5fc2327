"""Settings of programs that an actor starts: their command lines, and how they are kept from the actor, the
host and other episodes. Loads without torch."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from bus.config import Config

OWN_PYTHON = "{python}"
"""The word of a command that stands for the Python that runs Sluice."""


class IsolationConfig(Config):
    """What a program may reach and use. Namespaces of Linux hold it where the host lets users make them;
    where it does not, the actor's log says what is not held."""

    required: bool = False
    """Whether the actor refuses to start where the host allows no namespaces."""

    network: Literal["gateway", "host"] = "gateway"
    """What a program reaches over the network: the gateway alone, or all that the host reaches. The second
    includes a bus on this host, which without credentials believes everybody."""

    user: str | None = None
    """User that programs run as, by name or number, where the actor runs as root; `None` is the actor's own
    user. The user must be able to read the program and its interpreter."""

    readable: tuple[Path, ...] = ()
    """Files and directories that a program may read although they lie below /tmp, or in a directory that is
    hidden. It sees a /tmp of its own otherwise."""

    writable: tuple[Path, ...] = ()
    """Files and directories that a program may write besides its own directory and /tmp."""

    hidden: tuple[Path, ...] = ()
    """Files and directories that a program does not see, besides runs, prompts, caches of data sets and the
    credentials that this actor knows of."""

    cpu_s: int = Field(3600, ge=1)
    """Processor time of each process of a program."""

    memory_mb: int = Field(8192, ge=64)
    """Memory of all processes of a program together, in MiB. It is also the most that one of them may ask for
    as data."""

    processes: int = Field(4096, ge=4)
    """Processes and threads of a program at a time."""

    file_mb: int = Field(4096, ge=1)
    """Largest file that a program may write, in MiB, and the size of its /tmp, which is kept in memory."""


def with_own_python(words: Sequence[str]) -> list[str]:
    """Return the words of a command with that Python in the place of `{python}`."""
    return [sys.executable if word == OWN_PYTHON else word for word in words]
