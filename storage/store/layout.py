"""Which rows of a shard lie in which piece of its directory."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from bus.errors import StorageError
from storage.store.mapped import MappedSegments
from storage.store.pieces import Piece
from storage.store.segments import Segment

MAPPED_SEGMENTS = 128


class Layout:
    """The pieces of `directory` in order, with so many rows each. Threads that share it take turns."""

    def __init__(self, directory: Path, pieces: Sequence[Piece] = (), rows: Sequence[int] = ()) -> None:
        begins = list(accumulate(rows, initial=0))
        self.pieces = list(pieces)
        self.ends: array[int] = array(
            "q", (end for piece, end in zip(pieces, begins[1:], strict=True) for _ in piece.numbers)
        )
        """Row at which each segment ever written ends; it is exact wherever a piece ends."""
        self._directory = directory
        self._begins = begins[:-1]
        """First row of each piece."""
        self._mapped: MappedSegments[int] = MappedSegments(MAPPED_SEGMENTS)  # by their piece's first segment

    def path(self, piece: Piece) -> Path:
        """Where a piece is, or is to be."""
        return self._directory / piece.name

    def add(self, piece: Piece, end: int) -> None:
        """The next segment, with the rows from the last one's end to `end`."""
        self.pieces.append(piece)
        self._begins.append(self.ends[-1] if self.ends else 0)
        self.ends.append(end)

    def switch(self, old: Sequence[Piece], new: Piece) -> None:
        """Read from `new` from now on what was read from these neighbours: the same rows."""
        at = self.pieces.index(old[0])
        self.pieces[at : at + len(old)] = [new]
        self._begins[at : at + len(old)] = [self._begins[at]]
        for piece in old:
            self._mapped.drop(piece.first)

    def rows_of(self, piece: Piece) -> slice:
        """Return the rows that a piece holds, or held."""
        begin = self._begins[bisect_left(self.pieces, piece.first, key=lambda p: p.first)]
        return slice(begin, self.ends[piece.last])

    def place_of(self, row: int) -> tuple[Piece, int]:
        """The piece that a row lies in, and its row there. Raises `StorageError` when that was retired."""
        n = bisect_right(self._begins, row) - 1
        piece = self.pieces[n]
        if piece.retired:
            raise StorageError(
                f"{self.path(piece)} was retired to save space: restore its segment from the archive"
            )
        return piece, row - self._begins[n]

    def segment_of(self, row: int) -> tuple[Segment, int]:
        """Return the mapped segment of a row, and its place in it. Raises `StorageError` as `place_of`."""
        piece, at = self.place_of(row)
        return self._mapped.get(piece.first, lambda: Segment(self.path(piece))), at

    def close(self) -> None:
        """Unmap everything."""
        self._mapped.close()
