"""The sets of tokens that sampling kept where it cut others off: each token was drawn from its set alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bus.config import MOST_KEPT
from bus.errors import SchemaError


@dataclass(frozen=True, slots=True, eq=False)
class KeptSets:
    """The kept sets of N tokens, one after another."""

    counts: NDArray[np.uint16]
    """uint16 [N], size of each set; 0 where nothing was cut off, or nothing was sampled."""
    token_ids: NDArray[np.int32]
    """int32 [sum of the counts], the sets' tokens."""

    @classmethod
    def none(cls, tokens: int) -> Self:
        """Return the kept sets of so many tokens of which none has a set."""
        return cls(np.zeros(tokens, np.uint16), np.zeros(0, np.int32))

    @classmethod
    def of(cls, sets: Sequence[NDArray[np.int32]]) -> Self:
        """Return the kept sets with these tokens; a token with an empty set has none."""
        ids = np.concatenate(sets) if len(sets) else np.zeros(0, np.int32)
        return cls(np.array([len(each) for each in sets], np.uint16), ids.astype(np.int32))

    @classmethod
    def joined(cls, parts: Sequence["KeptSets"]) -> Self:
        """Return the sets of the tokens of these parts, one after another."""
        return cls(
            np.concatenate([part.counts for part in parts]),
            np.concatenate([part.token_ids for part in parts]),
        )

    @classmethod
    def from_bytes(cls, counts: bytes, token_ids: bytes) -> Self:
        """Return views of little-endian bytes."""
        return cls(np.frombuffer(counts, "<u2"), np.frombuffer(token_ids, "<i4"))

    @property
    def owners(self) -> NDArray[np.int64]:
        """Return for each of `token_ids` which of the N tokens was drawn from its set, ascending."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def first(self, tokens: int) -> "KeptSets":
        counts = self.counts[:tokens]
        return KeptSets(counts, self.token_ids[: int(counts.sum(dtype=np.int64))])

    def only(self, where: NDArray[np.bool_]) -> "KeptSets":
        """Return the kept sets without the sets of tokens that are False in `where` [N]."""
        return KeptSets(np.where(where, self.counts, 0).astype(np.uint16), self.token_ids[where[self.owners]])

    def padded(self) -> NDArray[np.int32]:
        """Return [N, size of the largest set], with -1 behind each set."""
        table = np.full((len(self.counts), int(self.counts.max(initial=0))), -1, np.int32)
        table[np.arange(table.shape[1]) < self.counts[:, None]] = self.token_ids
        return table


def check_kept_sets(name: str, drawn: NDArray[np.int32], counts: bytes, ids: bytes) -> None:
    """Raise `SchemaError` for kept sets that do not fit the tokens `drawn`, each of which its set holds.

    Args:
        name: names the tokens in the error.
        drawn: int32 [N].
        counts: uint16 [N] as bytes.
        ids: int32 as bytes, the sets' tokens."""
    if not counts and not ids:
        return
    length = len(drawn)
    if len(counts) != 2 * length or len(ids) % 4:
        raise SchemaError(f"{name}: {len(counts)} bytes of kept counts for {length} tokens")
    kept = KeptSets.from_bytes(counts, ids)
    if int(kept.counts.sum(dtype=np.int64)) != len(kept.token_ids):
        raise SchemaError(f"{name}: kept sets count other tokens than the {len(kept.token_ids)} of them")
    if int(kept.counts.max(initial=0)) > MOST_KEPT or int(kept.token_ids.min(initial=0)) < 0:
        raise SchemaError(f"{name}: a kept set has over {MOST_KEPT} tokens, or a negative one")
    owners = kept.owners
    found = owners[kept.token_ids == drawn[owners]]
    if not np.array_equal(found, np.flatnonzero(kept.counts)):
        raise SchemaError(f"{name}: a token is not in its kept set, or twice")
