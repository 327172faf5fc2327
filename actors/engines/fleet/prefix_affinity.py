"""Which engine holds the beginning of a request in its cache, as far as the fleet remembers."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

BLOCK = 32
"""Tokens. Beginnings are compared by whole blocks; a shorter one is not worth a detour."""
REMEMBERED = 1 << 16
"""Blocks: 2 million tokens."""


class Affinity:
    """Remembers who served each block of tokens, and what precedes it, last. The oldest is forgotten."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._holders: OrderedDict[int, str] = OrderedDict()

    def note(self, tokens: Sequence[int] | np.ndarray, holder: str) -> None:
        """`holder` has these tokens in its cache now."""
        for block in _blocks(tokens):
            self._holders[block] = holder
            self._holders.move_to_end(block)
        while len(self._holders) > self._remembered:
            self._holders.popitem(last=False)

    def holder(self, tokens: Sequence[int] | np.ndarray) -> str | None:
        """Return who has the longest known beginning of `tokens`."""
        found = None
        for block in _blocks(tokens):
            if block not in self._holders:
                break
            found = self._holders[block]
        return found

    def forget(self, holder: str) -> None:
        """The cache of `holder` is gone."""
        self._holders = OrderedDict((block, who) for block, who in self._holders.items() if who != holder)


def _blocks(tokens: Sequence[int] | np.ndarray) -> Iterator[int]:
    """Yield a hash for each whole block, which stands for all tokens up to its end."""
    data = np.asarray(tokens, np.int32)
    hashed = xxhash.xxh3_64()
    for start in range(0, len(data) - BLOCK + 1, BLOCK):
        hashed.update(data[start : start + BLOCK].tobytes())
        yield hashed.intdigest()
