"""Segments that stay mapped while others are read, so that a file is opened once for many reads."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from storage.store.segments import Segment

K = TypeVar("K", bound=Hashable)


class MappedSegments(Generic[K]):
    """Keeps a few segments mapped, which each hold a file descriptor. Threads that share them take turns."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._segments: OrderedDict[K, Segment] = OrderedDict()

    def get(self, key: K, opened: Callable[[], Segment]) -> Segment:
        """Return the segment of `key`, `opened` unless it is here; it becomes the last to be unmapped."""
        if key in self._segments:
            self._segments.move_to_end(key)
            return self._segments[key]
        segment = opened()
        if len(self._segments) >= self._most:
            self._segments.popitem(last=False)[1].close()
        self._segments[key] = segment
        return segment

    def drop(self, key: K) -> None:
        """Unmap that of `key`, if it is mapped."""
        if (segment := self._segments.pop(key, None)) is not None:
            segment.close()

    def close(self) -> None:
        """Unmap everything."""
        while self._segments:
            self._segments.popitem()[1].close()
