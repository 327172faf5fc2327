"""The tool that searches a local corpus by BM25: passages come back as text, in the manner of Search-R1."""

import asyncio
from collections.abc import Mapping, Sequence

from actors.episodes.task import JSON
from actors.settings.tools import SearchConfig
from actors.tools.base import Arguments, ToolResult, shortened
from bus.errors import ConfigError
from storage.built_in_tasks.generators import task_passages
from storage.prompt_files.rows import Row, read_rows


class SearchTool:
    """Answers with the passages that share most words with the query, the best first."""

    description = "Searches a collection of texts and returns the passages that fit the query best."
    parameters: Mapping[str, JSON] = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "words to search for"}},
        "required": ["query"],
        "additionalProperties": False,
    }

    def __init__(self, config: SearchConfig) -> None:
        """Read and index the corpus. Raises ConfigError for one that cannot be used, naming the row."""
        try:
            from actors.tools.passages import PassageIndex
        except ImportError as error:
            raise ConfigError("the search tool needs bm25s: pip install 'sluice-rl[search]'") from error
        self.name = config.name
        self._top_k = config.top_k
        passages = _corpus(config)
        self._passages = [shortened(passage, config.passage_characters) for passage in passages]
        stopwords = None if config.stopwords == "none" else config.stopwords
        try:
            self._index = PassageIndex(passages, stopwords=stopwords)
        except ValueError as error:
            raise ConfigError(f"{config.corpus}: {error}: nothing in it can be found") from error

    async def call(self, arguments: Arguments) -> ToolResult:
        """Search; a query without any word of the corpus finds nothing."""
        found = await asyncio.to_thread(self._index.best, str(arguments["query"]), self._top_k)
        texts = [f"[{n}] {self._passages[number]}" for n, number in enumerate(found, 1)]
        return ToolResult("\n".join(texts) or "nothing found")

    async def close(self) -> None:
        """Do nothing: nothing is held."""


def _corpus(config: SearchConfig) -> Sequence[str]:
    if config.of_task is not None:
        return task_passages(config.of_task)
    return [_passage(row) for row in read_rows(config.corpus)]


def _passage(row: Row) -> str:
    text, title = row.required("text"), row.values.get("title")
    if not (isinstance(text, str) and text.strip()):
        raise ConfigError(f"{row.where}: 'text' is not a text or is empty: fill it or remove the row")
    return f"({title}) {text}" if isinstance(title, str) and title else text
