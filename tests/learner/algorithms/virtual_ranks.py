"""Ranks of a data-parallel group in one process."""

from collections.abc import Sequence
from threading import Barrier, Thread

from bus.trajectory import Groups
from learner.distributed.exact_sums import Rows, exact_sums, joined


class Ranks:
    """Ranks as threads, whose rows are added up as those of real ones are (learner/data/data_parallel.py)."""

    def __init__(self, shares: Sequence[Groups]) -> None:
        self._shares, self._rows = shares, [{} for _ in shares]
        self._here = Barrier(len(shares), timeout=30)
        self.found: list[object] = [None] * len(shares)

    def run(self, work) -> list[object]:
        threads = [Thread(target=self._one, args=(rank, work)) for rank in range(len(self._shares))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return self.found

    def _one(self, rank: int, work) -> None:
        def sums(rows: Rows):
            self._rows[rank] = rows
            self._here.wait()
            found = exact_sums(joined(self._rows))
            self._here.wait()
            return found

        self.found[rank] = work(self._shares[rank], sums)
