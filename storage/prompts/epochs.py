"""An order of visits to the prompts of one file, over epochs, that one integer resumes."""

import numpy as np
from numpy.typing import NDArray

from bus.errors import ConfigError


class PromptOrder:
    """The endless sequence of epochs over `count` prompts, each in an order of its own drawn from `seed`."""

    def __init__(self, count: int, seed: int, shuffle: bool) -> None:
        if count < 1:
            raise ConfigError("no prompts to order: give at least one")
        self._count = count
        self.seed = seed
        self._shuffle = shuffle
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))

    def epoch(self, position: int) -> int:
        """Return the epoch of the position-th prompt."""
        return position // self._count

    def index(self, position: int) -> int:
        """Return the index of the position-th prompt, counted from 0 over all epochs."""
        epoch, place = divmod(position, self._count)
        if not self._shuffle:
            return place
        order = self._order
        if order[0] != epoch:
            order = self._order = (epoch, self._permutation(epoch))
        return int(order[1][place])

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        # numpy keeps raw bit streams the same across versions, but not Generator.permutation
        keys = np.random.PCG64([self.seed, epoch]).random_raw(self._count)
        return np.argsort(keys, kind="stable")
