"""The tools that search a local corpus by BM25 (package `bm25s`, optional), in the manner of Search-R1, and
read its documents."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import bm25s
from bm25s.tokenization import Tokenized

from actors.episodes.task import JSON
from actors.settings.tools import SearchConfig
from actors.tools.base import Arguments, Tool, ToolResult, shortened
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

    def __init__(self, config: SearchConfig, passages: Sequence[str]) -> None:
        """Index the corpus. Raises ConfigError for one in which nothing can be found."""
        self.name = config.name
        self._top_k = config.top_k
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


class FetchTool:
    """Answers with a part of a document of the corpus."""

    description = "Reads a document of the collection by its title, from its beginning or a later character."
    parameters: Mapping[str, JSON] = {
        "type": "object",
        "properties": {
            "title": {"type": "string", "description": "title as the search shows it, without brackets"},
            "start": {"type": "integer", "description": "first character to read, from 0"},
        },
        "required": ["title"],
        "additionalProperties": False,
    }

    def __init__(self, name: str, documents: Mapping[str, str], *, characters: int) -> None:
        self.name = name
        self._documents = documents
        self._characters = characters

    async def call(self, arguments: Arguments) -> ToolResult:
        title, start = str(arguments["title"]).strip(), arguments.get("start", 0)
        document = self._documents.get(title)
        if document is None:
            return ToolResult(f"no document is named {title!r}: give a title of a search", failed=True)
        if not (isinstance(start, int) and 0 <= start < len(document)):
            return ToolResult(f"{title!r} has characters 0 to {len(document) - 1}", failed=True)
        end = start + self._characters
        left = len(document) - end
        more = f"\n[{left} characters follow from start={end} on]" if left > 0 else ""
        return ToolResult(document[start:end] + more)

    async def close(self) -> None:
        """Do nothing: nothing is held."""


def search_tools(config: SearchConfig) -> list[Tool]:
    """Read the corpus and index it. Raises ConfigError for one that cannot be used, naming the row."""
    passages, documents = list[str](), defaultdict[str, list[str]](list)
    for title, text in _corpus(config):
        passages.append(f"({title}) {text}" if title else text)
        if title and config.fetch is not None:
            documents[title].append(text)
    tools: list[Tool] = [SearchTool(config, passages)]
    if config.fetch is not None:
        if not documents:
            raise ConfigError(
                f"{config.corpus}: no passage has a 'title', by which the tool {config.fetch!r} finds a "
                "document: give passages titles, or leave fetch out"
            )
        whole = {title: "\n".join(texts) for title, texts in documents.items()}
        tools.append(FetchTool(config.fetch, whole, characters=config.fetched_characters))
    return tools


def _corpus(config: SearchConfig) -> Iterable[tuple[str, str]]:
    if config.of_task is not None:
        return [("", text) for text in task_passages(config.of_task)]
    return map(_passage, read_rows(config.corpus))


def _passage(row: Row) -> tuple[str, str]:
    """Return the title of a passage, which may be empty, and its text."""
    text, title = row.required("text"), row.values.get("title")
    if not (isinstance(text, str) and text.strip()):
        raise ConfigError(f"{row.where}: 'text' is not a text or is empty: fill it or remove the row")
    return title.strip() if isinstance(title, str) else "", text
