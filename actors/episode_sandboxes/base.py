"""Contract of episodes' sandboxes: a back end starts them and carries out their commands. Files are moved by
commands, so that a back end does nothing else."""

import shlex
import socket
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Literal, Protocol
from urllib.parse import urlsplit

from actors.settings.episode_sandboxes import SandboxLimits
from bus.errors import SluiceError

WORKSPACE = "/workspace"
"""Directory in which commands begin, and which snapshots hold."""
FILE_TIMEOUT_S = 60.0
LARGEST_FILE = 1 << 26
LARGEST_SNAPSHOT = 1 << 32
GATEWAY_PORT = 41811
"""Port of its loopback at which a sandbox finds the gateway, where connections are brought there."""
NEAR = f"http://127.0.0.1:{GATEWAY_PORT}"
CommandEnd = Literal["exited", "time", "memory", "output"]
"""How a command ended: by itself, at its limit of time, with all processes of the sandbox at the limit of
memory, or at the limit of its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command to carry out in a sandbox."""

    words: Sequence[str]
    """The program and its arguments; no shell reads them."""
    timeout_s: float
    """Time after which a command is ended with all that it has started."""
    stdin: bytes = b""
    output_bytes: int = 1 << 16
    """Output, and errors, after which it is ended."""
    directory: str = WORKSPACE
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """What a command did."""

    stdout: bytes
    stderr: bytes
    end: CommandEnd
    status: int
    """Exit status; negative for the signal that ended it."""
    took_s: float


class SandboxFileError(SluiceError):
    """A file of a sandbox cannot be read or written, for a reason inside of it, such as its limits."""


class RunningSandbox(Protocol):
    """What a back end has started."""

    async def run(self, command: Command) -> CommandResult:
        """Carry out a command; several may go on at once. What it leaves in the background goes on after it.
        Raises ToolFailedError where the sandbox is gone by what ran in it, ToolError for a fault of its host.
        A command whose caller is cancelled is ended."""

    async def reach(self, gateway: str) -> tuple[str, socket.socket | None]:
        """Return the address by which commands reach the gateway that `start` was told, and a socket at which
        their connections come, unless they go there by themselves. Who has it closes it. Raises what `run`
        raises."""

    async def close(self) -> None:
        """End the sandbox with all that runs in it."""


class SandboxBackend(Protocol):
    """Starts sandboxes: a process, a daemon or a service."""

    async def start(
        self, image: str | None, limits: SandboxLimits, gateway: str | None = None
    ) -> RunningSandbox:
        """Start a sandbox of an image; None is that of the settings. It reaches nothing but the server at the
        address `gateway`, if there is one. Raises ToolError."""

    async def close(self) -> None:
        """End what the back end holds; its sandboxes are closed before."""


def host_and_port(url: str) -> tuple[str, int]:
    """Return where the server of an address listens. Raises ValueError for what is no address."""
    parts = urlsplit(url)
    if not parts.hostname:
        raise ValueError(f"{url!r} is no address of a server")
    return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


@dataclass(frozen=True, slots=True)
class EpisodeSandbox:
    """A sandbox with files, for one episode."""

    running: RunningSandbox
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    room: AsyncExitStack = field(default_factory=AsyncExitStack)
    """What is given back when the sandbox has ended."""

    async def run(self, command: Command) -> CommandResult:
        return await self.running.run(command)

    async def write(self, path: str, data: bytes, *, anew: bool = False) -> None:
        """Write a file and the directories that it needs; with `anew` what is there is removed before, and is
        not written through where it is a link. Raises SandboxFileError and what `run` raises."""
        before = 'rm -rf -- "$1" && ' if anew else ""
        await self._piped(f'{before}mkdir -p "$(dirname "$1")" && cat > "$1"', path, stdin=data)

    async def read(self, path: str, *, most_bytes: int = LARGEST_FILE) -> bytes:
        """Return what a file holds. Raises SandboxFileError and what `run` raises."""
        return await self._piped('cat "$1"', path, output_bytes=most_bytes)

    async def upload(self, archive: bytes, path: str = WORKSPACE) -> None:
        """Unpack a tar archive below a directory. Raises SandboxFileError and what `run` raises."""
        await self._piped('mkdir -p "$1" && tar -xf - -C "$1"', path, stdin=archive)

    async def snapshot(self, *, most_bytes: int = LARGEST_SNAPSHOT) -> bytes:
        """Return the workspace as a tar archive. Raises SandboxFileError and what `run` raises."""
        script = 'tar -cf - -C "$1" . || [ $? = 1 ]'  # 1: what still runs changed a file meanwhile
        return await self._piped(script, WORKSPACE, output_bytes=most_bytes)

    async def restore(self, snapshot: bytes) -> None:
        """Make the workspace that of a snapshot; processes go on. Raises SandboxFileError and what `run`
        raises."""
        await self._piped('cd "$1" && rm -rf -- ..?* .[!.]* * && tar -xf -', WORKSPACE, stdin=snapshot)

    async def close(self) -> None:
        async with self.room:
            await self.running.close()

    async def _piped(
        self, script: str, path: str, *, stdin: bytes = b"", output_bytes: int = 1 << 16
    ) -> bytes:
        words = ("/bin/sh", "-c", script, "sh", path if path.startswith("/") else f"{WORKSPACE}/{path}")
        ran = await self.run(
            Command(
                words=words, stdin=stdin, timeout_s=FILE_TIMEOUT_S, output_bytes=output_bytes, directory="/"
            )
        )
        if ran.end == "output":
            raise SandboxFileError(f"{path} has more than {output_bytes} bytes")
        if ran.end != "exited" or ran.status != 0:
            said = ran.stderr.decode(errors="replace").strip()
            raise SandboxFileError(said or f"{shlex.join(words[4:])}: ended by its limit of {ran.end}")
        return ran.stdout
