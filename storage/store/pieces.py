"""What a replay directory consists of, by the names in it, and which of it to merge or to retire.

Segments are numbered in the order of writing. A piece is one segment, several merged, or what is left of
them when they are retired, and its name says which: `segment_00000004`, `segment_00000004-00000051`,
`retired_00000004-00000051`. A piece that covers another's numbers replaces it, and a retired piece the
segment of the same numbers: so one rename switches, and whatever a crash leaves counts once.
"""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bus.errors import StorageError

MERGE_SEGMENTS = 48
"""So many neighbours of similar size become one."""
MERGED_BYTES = 256 << 20
"""Fewer of them when together they reach this size."""
SMALL_BYTES = (1 << 20, 16 << 20)
"""Below the first, segments are merged with their like; later what came of it, below the second."""

_NAME = re.compile(r"(segment|retired)_(\d{8,})(?:-(\d{8,}))?")


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of segment numbers, and what the directory holds of it."""

    first: int
    last: int
    retired: bool = False
    size_bytes: int = 0
    written_s: float = 0.0
    """When its newest trajectory was written, in seconds since the epoch."""

    @property
    def name(self) -> str:
        """Name of its directory, or of its file once it is retired."""
        kind = "retired" if self.retired else "segment"
        return f"{kind}_{self.first:08d}" + (f"-{self.last:08d}" if self.last > self.first else "")

    @property
    def numbers(self) -> range:
        """Numbers of the segments that it covers."""
        return range(self.first, self.last + 1)

    @classmethod
    def parse(cls, path: Path) -> "Piece":
        """The piece with the name of `path`. Raises `StorageError` when it is no piece's."""
        match = _NAME.fullmatch(path.name)
        if match is None:
            raise StorageError(f"{path} is foreign: restore the replay directory or move this away")
        first = int(match[2])
        return cls(first, int(match[3] or first), retired=match[1] == "retired")

    def replaces(self, other: "Piece") -> bool:
        """Whether `other` is what this one was made of."""
        if (self.first, self.last) == (other.first, other.last):
            return self.retired and not other.retired
        return self.first <= other.first and other.last <= self.last


def find_pieces(directory: Path) -> tuple[list[Piece], list[Piece]]:
    """The pieces of `directory` in order, without a gap from 0 on; and those that others replace.

    Raises `StorageError` naming what is foreign or follows a gap."""
    found = [Piece.parse(path) for path in directory.iterdir() if not path.name.startswith(".")]
    found.sort(key=lambda piece: (piece.first, -piece.last, not piece.retired))
    pieces: list[Piece] = []
    replaced: list[Piece] = []
    for piece in found:
        if pieces and pieces[-1].replaces(piece):
            replaced.append(piece)
        elif piece.first != (pieces[-1].last + 1 if pieces else 0):
            raise StorageError(
                f"{directory / piece.name} is here but an earlier segment is missing: restore the replay "
                "directory or move this away"
            )
        else:
            pieces.append(piece)
    return pieces, replaced


def choose_merge(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours that are due to become one; empty when none are. A byte is rewritten a few times at most."""
    ordered = list(pieces)
    for tiny, small in pairwise((0, *SMALL_BYTES)):
        run: list[Piece] = []
        size_bytes = similar = 0
        for piece in ordered:
            if piece.retired or piece.size_bytes >= small:
                run, size_bytes, similar = [], 0, 0
                continue
            run.append(piece)
            size_bytes += piece.size_bytes
            similar += piece.size_bytes >= tiny
            if similar >= MERGE_SEGMENTS or (similar > 1 and size_bytes >= MERGED_BYTES):
                return run
    return []


def choose_retirement(
    pieces: Sequence[Piece], *, retain_bytes: int | None, oldest_s: float, settled: Callable[[Piece], bool]
) -> list[Piece]:
    """Pieces to retire, oldest first: those written before `oldest_s`, and what exceeds `retain_bytes`.

    A piece that is not `settled` stays, and younger ones go in its place; asked only where it matters."""
    present = [piece for piece in pieces if not piece.retired]
    excess = 0 if retain_bytes is None else sum(piece.size_bytes for piece in present) - retain_bytes
    chosen: list[Piece] = []
    for piece in present:
        if (piece.written_s < oldest_s or excess > 0) and settled(piece):
            chosen.append(piece)
            excess -= piece.size_bytes
    return chosen


def merged(pieces: Collection[Piece], size_bytes: int = 0) -> Piece:
    """The piece that replaces these neighbours."""
    ordered = sorted(pieces, key=lambda piece: piece.first)
    written_s = max(piece.written_s for piece in pieces)
    return Piece(ordered[0].first, ordered[-1].last, size_bytes=size_bytes, written_s=written_s)
