"""The tools that a configuration names."""

from collections.abc import Sequence
from itertools import chain
from typing import cast

from actors.settings.sandbox_tools import SandboxToolConfig
from actors.settings.tools import CalculatorConfig, McpConfig, PythonToolConfig, SearchConfig, ToolConfig
from actors.tools.base import Tool
from actors.tools.calculator import Calculator
from actors.tools.python import PythonTool
from actors.tools.sandbox import Sandboxes
from bus.errors import ConfigError
from bus.process.plugins import built_part, refuse_of_record

PARTS = ("name", "description", "parameters", "call", "close")


def build_tools(configs: Sequence[ToolConfig]) -> dict[str, Tool]:
    """Build the tools, by name. Raises ConfigError for one that cannot work here, or a name used twice."""
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
            return _search(config)
        case McpConfig():
            return _mcp(config)
    return [cast(Tool, built_part("tool", config.tool, config.settings, PARTS))]


def _search(config: SearchConfig) -> Sequence[Tool]:
    """Index the corpus. Raises ConfigError for one that cannot be used, or may not be read."""
    try:
        from actors.tools.search import search_tools
    except ImportError as error:
        raise ConfigError("the search tool needs bm25s: pip install 'sluice-rl[search]'") from error
    corpus = str(config.corpus)
    if config.of_task is None:  # or a stranger would read a file of this host
        refuse_of_record(f"the corpus {corpus!r}", corpus)
    return search_tools(config)


def _mcp(config: McpConfig) -> Sequence[Tool]:
    """Connect to a server and return its tools. Raises ConfigError where that fails, or may not be done."""
    try:
        from actors.tools.mcp import McpServer
    except ImportError as error:
        raise ConfigError("tools of MCP servers need mcp: pip install 'sluice-rl[mcp]'") from error
    if config.command:
        refuse_of_record(f"MCP server {config.server!r}", *config.command, is_program=True)
    return McpServer(config).tools
