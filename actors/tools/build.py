"""The tools that a configuration names."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import cast

from pydantic import BaseModel, ValidationError

from actors.settings.sandbox_tools import SandboxToolConfig
from actors.settings.tools import (
    CalculatorConfig,
    McpConfig,
    PluginToolConfig,
    PythonToolConfig,
    SearchConfig,
    ToolConfig,
)
from actors.tools.base import Tool
from actors.tools.calculator import Calculator
from actors.tools.python import PythonTool
from actors.tools.sandbox import Sandboxes
from actors.tools.search import SearchTool
from bus.errors import ConfigError
from bus.process.plugins import load_function, refuse_of_record

PARTS = ("name", "description", "parameters", "call", "close")


def build_tools(configs: Sequence[ToolConfig]) -> dict[str, Tool]:
    """Build them, by name. Raises ConfigError for one that cannot work here, or a name used twice."""
    tools: dict[str, Tool] = {}
    for tool in chain.from_iterable(map(_build, configs)):
        if tool.name in tools:
            raise ConfigError(f"actors.environment.tools has two named {tool.name!r}: name one otherwise")
        tools[tool.name] = tool
    return tools


def _build(config: ToolConfig) -> Sequence[Tool]:
    match config:
        case PythonToolConfig():
            return [PythonTool.from_config(config)]
        case SandboxToolConfig():
            return Sandboxes(config).tools
        case CalculatorConfig():
            return [Calculator(config.name)]
        case SearchConfig():
            corpus = str(config.corpus)
            if config.of_task is None:  # or a stranger would read a file of this host
                refuse_of_record(f"the corpus {corpus!r}", corpus)
            return [SearchTool(config)]
        case McpConfig():
            return _mcp(config)
    return [_plugin(config)]


def _mcp(config: McpConfig) -> Sequence[Tool]:
    """Connect to a server and return its tools. Raises ConfigError where that fails, or may not be done."""
    try:
        from actors.tools.mcp import McpServer
    except ImportError as error:
        raise ConfigError("tools of MCP servers need mcp: pip install 'sluice-rl[mcp]'") from error
    if config.command:
        refuse_of_record(f"MCP server {config.server!r}", *config.command, is_program=True)
    return McpServer(config).tools


def _plugin(config: PluginToolConfig) -> Tool:
    """Build a tool of the user's own. Raises ConfigError for one that cannot be built or is none."""
    factory: Callable[..., object] = load_function("tool", config.tool, {})
    try:
        tool = factory(*_settings(config, getattr(factory, "Settings", None)))
    except ConfigError:
        raise
    except Exception as error:  # the user's class may raise anything
        raise ConfigError(f"tool {config.tool!r} cannot be built: {error!r}") from error
    if missing := [part for part in PARTS if not hasattr(tool, part)]:
        raise ConfigError(f"tool {config.tool!r} has no {' and no '.join(missing)}: see docs/extending.md")
    return cast(Tool, tool)


def _settings(config: PluginToolConfig, declared: type | None) -> list[BaseModel]:
    """Return the settings as the model that the class declares, or nothing if it declares none."""
    if not (isinstance(declared, type) and issubclass(declared, BaseModel)):
        if config.settings:
            raise ConfigError(
                f"tool {config.tool!r} takes no settings: declare them in a nested pydantic class Settings, "
                "or leave them out"
            )
        return []
    try:
        return [declared.model_validate(config.settings)]
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
        there = ", ".join(declared.model_fields)
        raise ConfigError(
            f"tool {config.tool!r}, settings: {'; '.join(problems)}; there are: {there}"
        ) from error
