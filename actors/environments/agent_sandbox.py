"""Runs the programs of agents in sandboxes, such as containers, which reach the gateway alone."""

import asyncio
import io
import os
import tarfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from actors.environments.agent_program import gateway_variables
from actors.episode_sandboxes.base import (
    Command,
    CommandResult,
    EpisodeSandbox,
    SandboxFileError,
    host_and_port,
)
from actors.episode_sandboxes.build import build_backend
from actors.episode_sandboxes.pool import SandboxPool
from actors.episodes.errors import ToolError, ToolFailedError
from actors.episodes.task import JSON, Task
from actors.gateway.server import Gateway
from actors.gateway.session import Session
from actors.programs.output import TAIL_BYTES
from actors.programs.runner import ProgramEnd, ProgramError, ProgramFailedError
from actors.settings.agents import AgentConfig
from actors.settings.episode_sandboxes import SandboxLimits
from actors.tools.sandbox import HEADS_OF_FILES, SANDBOX_CHECK, CheckLimits, judged_by_check, write_texts

PLACE = "/tmp/sluice"
"""Directory of a sandbox that holds its task and the files that the command names."""


class SandboxedPrograms:
    """Starts a sandbox for each program, which ends with all that it has started."""

    def __init__(self, config: AgentConfig, gateway: Gateway) -> None:
        """Raises ConfigError where the back end does not work here."""
        assert config.sandbox is not None
        self._config, self._limits = config, config.sandbox
        self._gateway = gateway
        self._pool = SandboxPool(
            build_backend(self._limits.backend),
            self._limits,
            at_once=config.programs + config.heldout_programs,
            gateway=lambda: gateway.url,
        )

    async def run(
        self, task: Task, session: Session, description: str, left: Path
    ) -> tuple[ProgramEnd, Mapping[str, JSON]]:
        """Run the program of an episode, and bring the workspace that it leaves to the directory `left` where
        a verifier wants it. Returns how it ended, and whether the workspace passes the check if there is one.
        Raises `ProgramFailedError` for what the program did, `ProgramError` for a fault of the host."""
        try:
            async with self._pool.sandbox(*self._pool.wish_of(task)) as sandbox, AsyncExitStack() as serving:
                base, listening = await sandbox.running.reach(self._gateway.url)
                if listening is not None:
                    await serving.enter_async_context(self._gateway.listening(listening))
                words = await self._furnished(sandbox, task, description)
                ended = await self._ended(sandbox, self._gateway.url_of(session, base), session.key, words)
                if self._config.verifier is not None:
                    await self._bring(sandbox, left)
                return ended, await self._examined(task, sandbox)
        except (ToolFailedError, SandboxFileError) as error:
            raise ProgramFailedError(str(error)) from error
        except ToolError as error:
            raise ProgramError(str(error)) from error

    async def close(self) -> None:
        await self._pool.close()

    async def _furnished(self, sandbox: EpisodeSandbox, task: Task, description: str) -> Sequence[str]:
        """Write a task and its files; return the command with the places of the files that it names."""
        try:
            await sandbox.write(f"{PLACE}/task.json", description.encode())
            await write_texts(sandbox, task.metadata.get("sandbox_files"))
            words, archive = await asyncio.to_thread(_packed, self._config.arguments)
            await sandbox.upload(archive, PLACE)
        except SandboxFileError as error:
            raise ToolError(f"the files of task {task.task_id} cannot be written: {error}") from error
        return words

    async def _ended(self, sandbox: EpisodeSandbox, url: str, key: str, words: Sequence[str]) -> ProgramEnd:
        inherited = {
            name: os.environ[name] for name in self._config.inherited_variables if name in os.environ
        }
        command = Command(
            words=words,
            timeout_s=self._config.program_timeout_s,
            output_bytes=self._config.most_output_bytes,
            variables={
                **inherited,
                **gateway_variables(self._config, url, key, host_and_port(url)[0]),
                "SLUICE_TASK": f"{PLACE}/task.json",
                **self._config.variables,
            },
        )
        return self._end_of(await sandbox.run(command), sandbox.limits)

    def _end_of(self, ran: CommandResult, may_use: SandboxLimits) -> ProgramEnd:
        output = (ran.stdout + ran.stderr)[-TAIL_BYTES:].decode(errors="replace").strip()
        if ran.end == "exited":
            return ProgramEnd(ran.status, output)
        if ran.end == "time":
            limit_s = self._config.program_timeout_s
            raise ProgramFailedError(
                f"it ran for {limit_s:g} s; its last output: {output}"
            ) from TimeoutError()
        limits = {
            "memory": f"took more than {may_use.memory_mb} MiB of memory",
            "output": f"wrote more than {self._config.most_output_bytes} bytes",
        }
        raise ProgramFailedError(f"it {limits[ran.end]}; its last output: {output}")

    async def _examined(self, task: Task, sandbox: EpisodeSandbox) -> Mapping[str, JSON]:
        if (check := self._limits.check) is None:
            return {}
        limits = CheckLimits(self._config.reward_timeout_s, self._config.most_output_bytes)
        return {SANDBOX_CHECK: await judged_by_check(self._pool, sandbox, task, check, limits)}

    async def _bring(self, sandbox: EpisodeSandbox, left: Path) -> None:
        archive = await sandbox.snapshot(most_bytes=HEADS_OF_FILES * sandbox.limits.disk_mb << 20)
        try:
            await asyncio.to_thread(_unpack, archive, left)
        except (tarfile.TarError, OSError) as error:
            raise SandboxFileError(f"the workspace cannot be brought here: {error}") from error


def _packed(arguments: Sequence[str]) -> tuple[list[str], bytes]:
    """Return a command whose words name files of this directory by their places in a sandbox, and these files
    as an archive."""
    packed, words = io.BytesIO(), []
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for number, word in enumerate(arguments):
            path = Path(word)
            # the first word may be this host's Python, which lies below its directory in a checkout
            is_below = not path.is_absolute() or (number > 0 and path.is_relative_to(Path.cwd()))
            is_ours = is_below and path.is_file()
            if is_ours:
                archive.add(path.resolve(), f"{number}/{path.name}")
            words.append(f"{PLACE}/{number}/{path.name}" if is_ours else word)
    return words, packed.getvalue()


def _unpack(archive: bytes, left: Path) -> None:
    """Unpack what a program left, but for devices and for links and paths that lead out of it."""

    def kept(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        try:
            found = tarfile.data_filter(member, path)
        except tarfile.FilterError:
            return None
        names = [found.name, found.linkname] if found.islnk() else [found.name]
        return None if any(_leads_on(left, name) for name in names) else found

    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as packed:
        packed.extractall(left, filter=kept)


def _leads_on(left: Path, name: str) -> bool:
    """Return whether a path goes upwards or by a link: what a sandbox sends may come from no tar, and
    Python's own filter overlooks links in paths that are too long (CVE-2025-4517)."""
    place, parts = left, Path(name).parts
    return ".." in parts or any((place := place / part).is_symlink() for part in parts)
