"""Tools in a sandbox that an episode has: a shell, files, and a Python session."""

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path

import structlog

from actors.episode_sandboxes.base import Command, CommandResult, EpisodeSandbox, SandboxFileError
from actors.episode_sandboxes.build import build_backend
from actors.episode_sandboxes.pool import SandboxPool
from actors.episodes.errors import ToolError, ToolFailedError
from actors.episodes.task import JSON, Task
from actors.sandboxes.sandbox import decoded
from actors.settings.sandbox_tools import SandboxToolConfig
from actors.tools import python_session
from actors.tools.base import Arguments, EpisodeState, ToolResult

log = structlog.get_logger()
HELPERS = "/tmp/.sluice"
"""Directory of what keeps a shell and a Python session between calls."""
SHELL = f"""
exec 2>&1
[ ! -f {HELPERS}/variables ] || . {HELPERS}/variables
cd "$(cat {HELPERS}/directory 2>/dev/null || pwd)" 2>/dev/null
trap 'status=$?; export -p > {HELPERS}/variables; pwd > {HELPERS}/directory; exit $status' EXIT
eval "$1"
"""
"""Runs a command where the one before it has ended, with its exported variables."""
FIND_SHELL = 'mkdir -p "$1" && command -v bash || command -v sh'
SESSION = Path(python_session.__file__).read_bytes()
SANDBOX_CHECK = "sandbox_check"
"""Field of an answer's metadata with what the check gives for what was left, 1 where it passes."""
CHECK_VARIABLES = {"HOME": "/tmp", "PYTHONNOUSERSITE": "1"}
"""Variables of a check: programs read settings of their own in a home, which the workspace is otherwise."""
HEADS_OF_FILES = 2
"""Factor by which an archive of small files exceeds them, at most: sparse files could fill any memory."""
SHOWN = 100
LARGEST_SHOWN = 1 << 20
"""Bytes of a file that is read or edited."""


def _text(description: str) -> dict[str, JSON]:
    return {"type": "string", "description": description}


def _schema(**properties: dict[str, JSON]) -> dict[str, JSON]:
    return {
        "type": "object", "properties": properties, "required": list(properties),
        "additionalProperties": False,
    }  # fmt: skip


_PATH = _text("path of the file, absolute or below /workspace")
OFFERED: Mapping[str, Mapping[str, tuple[str, Mapping[str, JSON]]]] = {
    "shell": {
        "shell": (
            "Runs a shell command and returns its output. Directory, exported variables and files are kept "
            "between calls, and so are programs in the background. There is no terminal.",
            _schema(command=_text("the command")),
        )
    },
    "python": {
        "python": (
            "Runs Python code in a session that keeps variables, imports and files between calls. Returns "
            "what it prints and the value of its last expression. Figures of matplotlib become files.",
            _schema(code=_text("the code")),
        )
    },
    "files": {
        "read_file": ("Returns the text of a file.", _schema(path=_PATH)),
        "write_file": (
            "Writes a file, with the directories that it needs, in place of what was there.",
            _schema(path=_PATH, text=_text("the whole text of the file")),
        ),
        "edit_file": (
            "Replaces a text that stands exactly once in a file.",
            _schema(path=_PATH, old=_text("the text that stands there"), new=_text("the text in its place")),
        ),
    },
}
"""Tools by what offers them: name, description and arguments."""


class SandboxTool:
    """One tool of those that share the sandbox of an episode."""

    def __init__(
        self, sandboxes: "Sandboxes", name: str, description: str, parameters: Mapping[str, JSON]
    ) -> None:
        self.name = name
        self.description = description
        self.parameters = parameters
        self.episode = sandboxes.episode
        self.room_wait_s = sandboxes.room_wait_s
        self.is_examined = sandboxes.are_checked
        self._sandboxes = sandboxes

    async def call(self, _: Arguments) -> ToolResult:
        """Refuse: each episode has a sandbox."""
        raise ToolError(f"{self.name} works in the sandbox of an episode")

    async def examined(self, state: EpisodeState) -> Mapping[str, JSON]:
        """Return what the check gives for what the model left. Raises ToolError."""
        assert isinstance(state, SandboxState)
        return {SANDBOX_CHECK: await self._sandboxes.judged(state)}

    async def close(self) -> None:
        await self._sandboxes.close()


class Sandboxes:
    """Gives the tools of each episode a sandbox."""

    def __init__(self, config: SandboxToolConfig) -> None:
        """Raises ConfigError where the back end does not work here."""
        self._config = config
        both = config.at_once + config.heldout_sandboxes
        self._pool = SandboxPool(build_backend(config.backend), config, at_once=both)
        self._places = {
            False: asyncio.Semaphore(config.at_once),
            True: asyncio.Semaphore(config.heldout_sandboxes),
        }
        """Places by whether a task is held out."""
        self._closing = asyncio.Lock()
        self._is_closed = False

    @property
    def tools(self) -> Sequence[SandboxTool]:
        offered = [OFFERED[kind] for kind in dict.fromkeys(self._config.offers)]
        return [SandboxTool(self, name, *told) for tools in offered for name, told in tools.items()]

    @property
    def room_wait_s(self) -> float:
        return self._config.host_budget.wait_s

    @property
    def are_checked(self) -> bool:
        return self._config.check is not None

    async def judged(self, state: "SandboxState") -> float:
        """Return what the check gives for the workspace. Raises ToolError for a fault of the host."""
        limits = CheckLimits(self._config.command_s, self._config.output_kb << 10)
        return await judged_by_check(self._pool, state.sandbox, state.task, self._config.check or "", limits)

    @asynccontextmanager
    async def episode(self, task: Task) -> AsyncIterator["SandboxState"]:
        """Have a sandbox while inside, in which the task's files are. Raises ToolError."""
        wish = self._pool.wish_of(task)
        async with self._places[task.heldout], self._pool.sandbox(*wish) as sandbox:
            state = SandboxState(sandbox, self._config, task)
            await state.begin()
            yield state

    async def close(self) -> None:
        async with self._closing:
            if not self._is_closed:
                await self._pool.close()
                self._is_closed = True


@dataclass(frozen=True, slots=True)
class CheckLimits:
    """What a check may take."""

    timeout_s: float
    output_bytes: int


async def judged_by_check(
    pool: SandboxPool, judged: EpisodeSandbox, task: Task, check: str, limits: CheckLimits
) -> float:
    """Return what a check gives for what is in a workspace, apart from all that was left running there, which
    ends. Raises ToolError for a fault of the host."""
    proof, files = secrets.token_hex(16), task.metadata.get("sandbox_check_files")
    try:
        left = await judged.snapshot(most_bytes=HEADS_OF_FILES * judged.limits.disk_mb << 20)
        await judged.close()  # a back end may have no room for both
        async with pool.further(*pool.wish_of(task)) as sandbox:
            await sandbox.restore(left)
            await write_texts(sandbox, files, anew=True)
            ran = await sandbox.run(
                Command(
                    words=("/bin/sh", "-c", check), stdin=f"{proof}\n".encode(), variables=CHECK_VARIABLES,
                    timeout_s=limits.timeout_s, output_bytes=limits.output_bytes,
                )
            )  # fmt: skip
    except (SandboxFileError, ToolFailedError) as error:  # what the model left, such as a full disk
        log.info("sandbox_is_not_checked", task=task.task_id, reason=str(error))
        return 0.0
    first, *told = ran.stdout.rstrip().rpartition(b"\n")[2].split(maxsplit=1) or [b""]
    if ran.end != "exited" or ran.status != 0 or first != proof.encode():
        return 0.0
    try:
        given = float(told[0]) if told else 1.0
    except ValueError:
        given = nan
    if not isfinite(given):
        log.warning(
            "sandbox_check_gave_no_number", task=task.task_id, given=told[0][:SHOWN].decode(errors="replace")
        )
        return 0.0
    return given


async def write_texts(sandbox: EpisodeSandbox, files: JSON, *, anew: bool = False) -> None:
    """Write the texts of a task, by path; with `anew` not through links that stand there. Raises
    SandboxFileError and ToolError."""
    for path, text in files.items() if isinstance(files, Mapping) else ():
        await sandbox.write(path, str(text).encode(), anew=anew)


class SandboxState:
    """The sandbox of one episode, as its tools use it."""

    def __init__(self, sandbox: EpisodeSandbox, config: SandboxToolConfig, task: Task) -> None:
        self.sandbox = sandbox
        self.task = task
        self._config = config
        self._shell = "/bin/sh"
        self._calls: Mapping[str, Callable[[Arguments], Awaitable[ToolResult]]] = {
            "shell": self._run_shell, "python": self._run_python, "read_file": self._read,
            "write_file": self._write, "edit_file": self._edit,
        }  # fmt: skip

    async def begin(self) -> None:
        """Write the task's files, and what sessions need. Raises ToolError."""
        try:
            found = await self._ran(("/bin/sh", "-c", FIND_SHELL, "sh", HELPERS))
            self._shell = decoded(found.stdout).strip() or self._shell
            if "python" in self._config.offers:
                await self.sandbox.write(f"{HELPERS}/session.py", SESSION)
            await write_texts(self.sandbox, self.task.metadata.get("sandbox_files"))
        except SandboxFileError as error:
            raise ToolError(f"the files of task {self.task.task_id} cannot be written: {error}") from error

    async def call(self, tool: str, arguments: Arguments) -> ToolResult:
        """Do what a tool does. What the model did wrong is a result that says so. Raises ToolError."""
        try:
            return await self._calls[tool](arguments)
        except SandboxFileError as error:
            return ToolResult(f"error: {error}", failed=True)

    async def _run_shell(self, arguments: Arguments) -> ToolResult:
        return self._told(await self._ran((self._shell, "-c", SHELL, "sh", str(arguments["command"]))))

    async def _run_python(self, arguments: Arguments) -> ToolResult:
        python = self._config.python or (sys.executable if self._config.on_this_host else "python3")
        code = str(arguments["code"]).encode("utf-8", "replace")
        return self._told(await self._ran((python, "-S", f"{HELPERS}/session.py"), code))

    async def _read(self, arguments: Arguments) -> ToolResult:
        return ToolResult(decoded(await self.sandbox.read(str(arguments["path"]), most_bytes=LARGEST_SHOWN)))

    async def _write(self, arguments: Arguments) -> ToolResult:
        await self.sandbox.write(str(arguments["path"]), str(arguments["text"]).encode("utf-8", "replace"))
        return ToolResult("written")

    async def _edit(self, arguments: Arguments) -> ToolResult:
        path, old = str(arguments["path"]), str(arguments["old"])
        text = (await self.sandbox.read(path, most_bytes=LARGEST_SHOWN)).decode("utf-8", "surrogateescape")
        if (found := text.count(old) if old else 0) != 1:
            return ToolResult(f"error: the text stands {found} times in {path}, not once", failed=True)
        changed = text.replace(old, str(arguments["new"]))
        await self.sandbox.write(path, changed.encode("utf-8", "surrogateescape"))
        return ToolResult("edited")

    async def _ran(self, words: Sequence[str], stdin: bytes = b"") -> CommandResult:
        config = self._config
        return await self.sandbox.run(
            Command(words=words, stdin=stdin, timeout_s=config.command_s, output_bytes=config.output_kb << 10)
        )

    def _told(self, ran: CommandResult) -> ToolResult:
        """Return what a command wrote, and what the model should know about its end."""
        limits = self.sandbox.limits
        note = {
            "exited": f"[status {ran.status}]" if ran.status else "",
            "time": f"[stopped after {self._config.command_s:g} s]",
            "memory": f"[all programs were stopped: they took more than {limits.memory_mb} MiB]",
            "output": "[stopped: it wrote too much]",
        }[ran.end]
        parts = (decoded(ran.stdout), decoded(ran.stderr), note)
        text = "\n".join(part.rstrip("\n") for part in parts if part)
        return ToolResult(text or "[no output]", failed=ran.end != "exited" or ran.status != 0)
