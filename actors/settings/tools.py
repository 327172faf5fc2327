"""Settings of tools. Loads without torch."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from actors.settings.sandbox_tools import SandboxToolConfig
from bus.config import Config, HttpUrl

OF_TASK = "task:"
"""Beginning of a corpus that is a built-in task's."""
NAME = r"^[a-zA-Z][a-zA-Z0-9_-]{0,63}$"


class SandboxConfig(Config):
    """What a program in the sandbox may use, and how many run at a time."""

    wall_s: float = Field(10.0, gt=0)
    """Longest time that a program may run."""
    cpu_s: int = Field(10, ge=1)
    """Processor time that each process of a program may use."""
    memory_mb: int = Field(512, ge=64)
    """Address space of each process of a program."""
    processes: int = Field(1, ge=1, le=64)
    """Most processes and threads of a program at a time; each has the memory above to itself."""
    file_mb: int = Field(16, ge=1)
    """Space for the files that a program writes; they are gone when it ends. They are kept in memory."""
    packages: tuple[str, ...] = ()
    """Modules of the actor's environment that are loaded before programs start, such as `numpy` or `sympy`.
    Programs may then import whatever is installed there."""
    at_once: int = Field(4, ge=1)
    """Most programs of this actor that run at a time; further ones wait."""


class PythonToolConfig(SandboxConfig):
    """Tool that runs Python code in a sandbox: own process, no network, no files of the host."""

    type: Literal["python"] = "python"
    """Name of the tool's kind."""
    name: str = Field("python", pattern=NAME)
    """Name by which the model calls it."""
    output_kb: int = Field(64, ge=1)
    """Output after which a program is ended; the model sees no more than `output_characters` of it."""


class CalculatorConfig(Config):
    """Tool that computes an arithmetic expression."""

    type: Literal["calculator"] = "calculator"
    """Name of the tool's kind."""
    name: str = Field("calculator", pattern=NAME)
    """Name by which the model calls it."""


class SearchConfig(Config):
    """Tool that finds passages of a local corpus by BM25, in the manner of Search-R1 (arXiv:2503.09516)."""

    type: Literal["search"] = "search"
    """Name of the tool's kind."""
    name: str = Field("search", pattern=NAME)
    """Name by which the model calls it."""
    corpus: Path
    """A .jsonl or .parquet file of passages, with `text` and perhaps `title`, on each actor's host; or
    `task:search`, the corpus of the built-in task `search`, which needs no file."""
    top_k: int = Field(3, ge=1)
    """Number of passages that a search answers with."""
    passage_characters: int = Field(1000, ge=1)
    """Length to which a passage is cut."""
    stopwords: Literal["en", "none"] = "en"
    """Words that say nothing and are left out of passages and queries."""
    fetch: str | None = Field(None, pattern=NAME)
    """Name of a second tool, by which the model reads a document of the corpus: all passages with the same
    `title`, in the order of the file. `None` offers no such tool."""
    fetched_characters: int = Field(3900, ge=1)
    """Length of what one call of that tool reads: `output_characters` less 100, for the note of what follows,
    at most. A call in tags reads the beginning alone."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,) if self.fetch is None else (self.name, self.fetch)

    @property
    def of_task(self) -> str | None:
        """Name of the built-in task whose corpus is meant; None for a file."""
        name = str(self.corpus)
        return name.removeprefix(OF_TASK) if name.startswith(OF_TASK) else None


class PluginToolConfig(Config):
    """Tool of the user's own."""

    type: Literal["plugin"]
    """Name of the tool's kind."""
    tool: str
    """Class of the tool, as `my_pkg.my_module:Class`."""
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of the tool, which its nested class `Settings` declares."""


class McpConfig(Config):
    """All tools, or some, of a server that speaks the Model Context Protocol."""

    type: Literal["mcp"] = "mcp"
    """Name of the tool's kind."""
    command: tuple[str, ...] = ()
    """Program that the actor starts, with its arguments; it speaks over its standard input and output. A word
    `{python}` stands for the Python that runs Sluice."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of that program, beside PATH and HOME."""
    url: HttpUrl | None = None
    """Address of a server that runs already, as http://host:port/mcp (streamable HTTP)."""
    allowed: tuple[str, ...] = ()
    """Names of the server's tools that the model may call; without any it may call all."""
    sessions: Literal["episode", "shared"] = "episode"
    """Whether each episode has a session of its own, and with `command` a program of its own; `shared` is for
    servers that keep nothing between calls, or that all rollouts may change."""
    start_timeout_s: float = Field(60.0, gt=0)
    """Longest time until the server has said which tools it has."""

    @model_validator(mode="after")
    def _names_one_server(self) -> Self:
        if bool(self.command) == (self.url is not None):
            raise ValueError(
                f"command={list(self.command)} with url={self.url!r}: name a program to start or an address, "
                "one of the two"
            )
        return self

    @property
    def server(self) -> str:
        return self.url or " ".join(self.command)


ToolConfig = Annotated[
    PythonToolConfig | SandboxToolConfig | CalculatorConfig | SearchConfig | McpConfig | PluginToolConfig,
    Field(discriminator="type"),
]
