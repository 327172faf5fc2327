"""Settings of the environment in which a model calls tools. Loads without torch."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from actors.settings.environment import EnvironmentSettings
from actors.settings.episode_sandboxes import EpisodeSandboxes
from actors.settings.rewards import RewardConfig
from actors.settings.sandbox_tools import SandboxToolConfig
from actors.settings.tools import McpConfig, PluginToolConfig, SearchConfig, ToolConfig

NOTE_CHARACTERS = 100
"""Room for the note that ends a part of a document."""


class ToolsConfig(EnvironmentSettings, RewardConfig):
    """Environment in which an episode is a chat with tools, until the model answers without calling one."""

    type: Literal["tools"]
    built_by: ClassVar[str] = "actors.environments.tools:ToolChat.from_config"
    tools: tuple[ToolConfig, ...] = Field(min_length=1)
    """Tools that the model may call, each a table with its `type`: python, sandbox, calculator, search, mcp
    or plugin."""
    calls: Literal["native", "tags"] = "native"
    """How the model calls a tool. `native`: as its chat template says, which is told of the tools. `tags`: as
    `<name>argument</name>` in its text, for tools with one text argument; results come as
    `<result>...</result>` from the user."""
    stop_at_call: bool = False
    """Whether a completion ends with its first call, as in Search-R1 (arXiv:2503.09516), for models that do
    not end their turn there. For `tags` alone."""
    results: Literal["messages", "inline"] = "messages"
    """Where results stand. `messages`: in a message of their own, which the model answers. `inline`: in the
    model's own answer, right after the call, and it goes on from there, as in ReTool (arXiv:2504.11536); for
    `tags` with `stop_at_call`."""
    system: str | None = None
    """System message before the prompt, where that has none. With `tags` it should say how to call the
    tools."""
    max_turns: int = Field(8, ge=1)
    """Completions of an episode; one whose last completion calls a tool ends as `turn_limit`."""

    @property
    def agent_names(self) -> tuple[str, ...]:
        return ("solver",)

    token_budget: int | None = Field(None, ge=1)
    """Tokens that the model may sample in an episode, over all turns; one that has used them up ends as
    `length`. `None`: as many as turns and context allow."""
    calls_per_turn: int = Field(4, ge=1)
    """Calls in one completion that are carried out; further ones are answered with an error."""
    parallel_calls: bool = False
    """Whether the calls of one completion are carried out side by side, instead of one after the other."""
    output_characters: int = Field(4000, ge=16)
    """Length to which a tool's answer is cut, in the middle and with a note."""
    tool_timeout_s: float = Field(120.0, gt=0)
    """Longest time that one call may take, above the limits that the tool sets itself. The model is told of
    both; the rollout ends as `tool_error` where none of the tool's latest 100 calls worked, and where a call
    of `python` waits for so long until it may run."""
    timeout_s: float = Field(1800.0, gt=0)
    """Longest time that an episode may take before it ends as `timeout`."""

    @property
    def _names(self) -> list[str]:
        names: list[str] = []
        for tool in self.tools:
            if isinstance(tool, SandboxToolConfig | SearchConfig):
                names += tool.names
            elif not isinstance(tool, PluginToolConfig | McpConfig):
                names.append(tool.name)
        return names

    @property
    def known_tools(self) -> list[str] | None:
        """Return the names of all tools; None where some show only when they are built."""
        shows_late = any(isinstance(tool, PluginToolConfig | McpConfig) for tool in self.tools)
        return None if shows_late else self._names

    @property
    def sandboxes(self) -> EpisodeSandboxes | None:
        return next((tool for tool in self.tools if isinstance(tool, SandboxToolConfig)), None)

    @property
    def checks_sandbox(self) -> bool:
        return any(isinstance(tool, SandboxToolConfig) and tool.check is not None for tool in self.tools)

    @property
    def reads_native_calls(self) -> bool:
        return self.calls == "native"

    @model_validator(mode="after")
    def _only_tags_end_a_completion(self) -> Self:
        if self.stop_at_call and self.calls != "tags":
            raise ValueError('stop_at_call is for calls = "tags": leave it out, or set calls = "tags"')
        return self

    @model_validator(mode="after")
    def _only_what_stopped_goes_on(self) -> Self:
        if self.results == "inline" and not self.stop_at_call:
            raise ValueError('results = "inline" needs calls = "tags" and stop_at_call = true: set both')
        return self

    @model_validator(mode="after")
    def _answers_have_no_reasoning(self) -> Self:
        self.refuse_reasoning_rewards()
        return self

    @model_validator(mode="after")
    def _answers_have_what_was_fetched(self) -> Self:
        most = self.output_characters - NOTE_CHARACTERS
        for tool in self.tools:
            if isinstance(tool, SearchConfig) and tool.fetch and tool.fetched_characters > most:
                raise ValueError(
                    f"output_characters={self.output_characters} would cut {tool.fetch!r} in the middle: set "
                    f"its fetched_characters={tool.fetched_characters} to {most} at most, or raise the former"
                )
        return self

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = self._names
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"tools has two named {', '.join(twice)}: give them a `name` each")
        return self
