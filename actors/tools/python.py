"""The tool that runs a model's Python code in the sandbox."""

from collections.abc import Mapping
from typing import Self

from actors.episodes.task import JSON
from actors.sandboxes.sandbox import Ran, Sandbox, configured_sandbox
from actors.settings.tools import PythonToolConfig
from actors.tools.base import Arguments, ToolResult


class PythonTool:
    """Runs each call's code as a program of its own, and answers with what it printed."""

    description = (
        "Runs a Python program and returns what it prints. Each call starts afresh: no variables or files "
        "are kept. There is no network."
    )
    parameters: Mapping[str, JSON] = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "Python code that prints its results"}},
        "required": ["code"],
        "additionalProperties": False,
    }

    def __init__(self, name: str, sandbox: Sandbox, *, wall_s: float) -> None:
        self.name = name
        self._sandbox = sandbox
        self.wall_s = wall_s

    @classmethod
    def from_config(cls, config: PythonToolConfig) -> Self:
        """Build with a sandbox of its own. Raises ConfigError where the host allows none."""
        sandbox = configured_sandbox(config, output_bytes=config.output_kb * 1024)
        return cls(config.name, sandbox, wall_s=config.wall_s)

    async def call(self, arguments: Arguments) -> ToolResult:
        ran = await self._sandbox.run(str(arguments["code"]))
        failed = ran.end != "exited" or ran.status != 0
        parts = (ran.stdout, ran.stderr, self._note(ran))
        return ToolResult("\n".join(part.rstrip("\n") for part in parts if part) or "[no output]", failed)

    def _note(self, ran: Ran) -> str:
        """Return what the model should know about the program's end, beyond what the program said."""
        if ran.end == "exited":
            return f"[ended by signal {-ran.status}]" if ran.status < 0 else ""
        return {
            "time": f"[stopped after {self.wall_s:g} s]",
            "cpu": "[stopped: it used up its processor time]",
            "output": "[stopped: it printed too much]",
            "stopped": "[stopped]",
        }[ran.end]

    async def close(self) -> None:
        await self._sandbox.close()
