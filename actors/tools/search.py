"""The tool that searches a local corpus by BM25 (package `bm25s`, optional): passages come back as text, in
the manner of Search-R1."""

import asyncio
from collections.abc import Mapping, Sequence

import bm25s
from bm25s.tokenization import Tokenized

from actors.episodes.task import JSON
from actors.settings.tools import SearchConfig
from actors.tools.base import Arguments, ToolResult, shortened
from bus.errors import ConfigError
from storage.built_in_tasks.generators import task_passages
from storage.prompt_files.rows import Row, read_rows


class PassageIndex:
    """Finds the passages that share most words with a query, in memory."""

    def __init__(self, passages: Sequence[str], *, stopwords: str | None) -> None:
        """Index `passages`. Raises ValueError where they have no word at all."""
        self._stopwords = stopwords
        self._count = len(passages)
        tokens = self._tokens(passages)
        if not any(tokens.ids):
            raise ValueError("no passage has a word")
        self._index = bm25s.BM25()
        self._index.index(tokens, show_progress=False)

    def best(self, query: str, top_k: int) -> list[int]:
        """Return the numbers of at most `top_k` passages that share a word with `query`, the best first."""
        tokens = self._tokens([query])
        if not tokens.ids[0]:
            return []
        found = self._index.retrieve(tokens, k=min(top_k, self._count), show_progress=False)
        pairs = zip(found.documents[0], found.scores[0], strict=True)
        return [int(number) for number, score in pairs if score > 0]

    def _tokens(self, texts: Sequence[str]) -> Tokenized:
        return bm25s.tokenize(list(texts), stopwords=self._stopwords, show_progress=False)


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
