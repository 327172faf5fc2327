"""An index of passages by BM25 (bm25s, an optional package)."""

from collections.abc import Sequence

import bm25s
from bm25s.tokenization import Tokenized


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
