"""What environments do with the tools that a prompt offers: use them, choose by them, or refuse them."""

from collections.abc import Collection, Sequence

from actors.episodes.errors import EpisodeError
from actors.episodes.task import Task
from actors.settings.environment import EnvironmentSettings

READS_NONE = 'or leave them unread by data.keys.tools = ""'
"""Remedy where tools of prompts cannot be used."""


def names_of(tools: Sequence[object]) -> tuple[str, ...]:
    """Return the names of tools in the shape of OpenAI's."""
    functions = (tool["function"] for tool in tools if isinstance(tool, dict))
    return tuple(str(function["name"]) for function in functions)


def refused_tools(tools: Sequence[object], config: EnvironmentSettings) -> str | None:
    """Return why an environment cannot offer the tools of a prompt, and the remedy; None if it can. Which
    tools a plug-in or an MCP server has shows when it is built: each of its rollouts looks then."""
    if not tools:
        return None
    if not config.shows_tools:
        return refused_by(config.type)
    return None if config.known_tools is None else refused_names(names_of(tools), config.known_tools)


def refused_names(names: Sequence[str], known: Collection[str]) -> str | None:
    """Return which named tool no environment could call, and the remedy; None if there is none."""
    unknown = [name for name in names if name not in known]
    if not unknown:
        return None
    return (
        f"it offers the tool {unknown[0]!r}, which the environment `tools` cannot carry out; it has "
        f"{', '.join(known)}: define it in actors.environment.tools, {READS_NONE}"
    )


def refused_by(kind: str) -> str:
    """Return why an environment of this type takes no tools of prompts, and the remedy."""
    return (
        f"it offers tools, which the environment {kind!r} does not show to the policy: use single_turn or "
        f"tools, {READS_NONE}"
    )


def refuse_tools(task: Task, kind: str) -> None:
    """Raise `EpisodeError` for a task with tools, in an environment that shows none."""
    if task.tools:
        raise EpisodeError(f"task {task.task_id}: {refused_by(kind)}")
