"""What ranks tell each other of the weights that they publish together."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from learner.backends.contract.backend import NO_TENSORS, Exported, ExportedPiece
from learner.config.model import ModelConfig
from learner.publication import divided_weights
from learner.publication.divided_weights import _Changes, _exchanged
from learner.publication.host_copy import Copied, HostCopy
from learner.publication.rank_tensors import OtherRanks, Wish
from learner.world.rank import Rank
from tests.learner.mini_run import MiniRun

pytestmark = pytest.mark.slow
A_ROUND = 100
COLUMNS = 4


def exchange(counts: Sequence[Sequence[int]]) -> list[tuple[list[int], list[int]]]:
    """Send changes, so many from each rank to each; return what each turn brought."""
    rank, sent = dist.get_rank(), []
    for to, count in enumerate(counts[rank]):
        places = torch.arange(count) + 1000 * rank + 10_000 * to
        sent.append([_Changes(some, some.to(torch.int16)) for some in (places[:7], places[7:])])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(divided_weights, "ROUND_ELEMENTS", A_ROUND)
        return [(places.tolist(), words.tolist()) for places, words in _exchanged(sent)]


def test_no_rank_receives_more_at_a_time_than_is_compared_however_many_send_to_it(worlds):
    counts = [[3, 95], [0, 99]]
    for to, turns in enumerate(worlds.run(2, exchange, counts)):
        assert max(len(places) for places, _ in turns) <= A_ROUND
        expected = [n + 1000 * source + 10_000 * to for source in range(2) for n in range(counts[source][to])]
        assert sorted(place for places, _ in turns for place in places) == expected
        assert all(places == words for places, words in turns)


class FailingCopy(HostCopy):
    """Fails on rank 1, when rank 0 has its part."""

    def take(self, weights: Exported, *, lend: bool = False) -> Copied:
        copied = super().take(weights, lend=lend)
        if dist.get_rank() == 1:
            raise MemoryError("no memory on rank 1")
        return copied


def fail_to_copy(directory: Path) -> str:
    return asyncio.run(_fail_to_copy(directory))


async def _fail_to_copy(directory: Path) -> str:
    starts = torch.arange(3) * COLUMNS
    rows, numbers = torch.ones(3, COLUMNS), torch.zeros(3, dtype=torch.int64)
    name = "ab"[dist.get_rank()]
    piece = ExportedPiece(rows, torch.float32, (name,), numbers, starts)
    exported = Exported({"a": (3, COLUMNS), "b": (3, COLUMNS)}, {}, NO_TENSORS, pieces=[piece])
    group = SimpleNamespace(rank=dist.get_rank, size=dist.get_world_size)
    backend = SimpleNamespace(
        hf_config=None, data_parallel_group=group, size_bytes=0, exported=lambda: exported, adapters=None
    )
    settings = replace(
        MiniRun(None, directory, None, directory / "none").settings(), model=ModelConfig(dtype="bfloat16")
    )
    with ThreadPoolExecutor(1) as thread:
        rank = Rank(backend, settings, reader=None, demonstrations=None, thread=thread)
        rank._host = FailingCopy(torch.bfloat16)
        try:
            await rank.copy_weights()
        except MemoryError as error:
            rank.fulfil(Wish("snapshot", (0, ())))
            return str(error)

        async def send(_: Wish) -> None:
            """The other rank knows."""

        others = OtherRanks(rank._host, rank._answers, send)
        try:
            return str(await asyncio.wait_for(others.snapshot(0, ()), 60))
        except MemoryError as error:
            return str(error)


def test_rank_0_hears_at_once_that_another_rank_could_not_copy_its_weights(worlds, tmp_path):
    assert worlds.run(2, fail_to_copy, tmp_path) == ["no memory on rank 1"] * 2
