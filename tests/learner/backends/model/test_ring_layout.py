"""What context-parallel ranks see of one another's keys, against the mask of causal attention."""

import random
from itertools import accumulate

import pytest
import torch

from learner.backends.megatron.model.attention.context_attention import chunks_of_rank
from learner.backends.megatron.model.attention.key_sets import common
from learner.backends.megatron.model.attention.ring_layout import RingLayout, RingStep, _Piece, _pieces

CPU = torch.device("cpu")


def positions(lengths: list[int], ranks: int, rank: int) -> torch.Tensor:
    """Sequence and position of each token of a rank, [T, 2]."""
    found = []
    for sequence, length in enumerate(lengths):
        chunks = torch.arange(length).chunk(2 * ranks)
        own = torch.cat([chunks[i] for i in chunks_of_rank(ranks, rank)])
        found.append(torch.stack((torch.full_like(own, sequence), own), 1))
    return torch.cat(found)


def numbers(rows: torch.Tensor | slice, of: int) -> torch.Tensor:
    return torch.arange(of)[rows]


def seen_in(step: RingStep, queries: int, sent: torch.Tensor) -> torch.Tensor:
    """How often each query sees each key of the rank that the keys come from, int [queries, keys]."""
    seen = torch.zeros(queries, queries, dtype=torch.int64)
    assert len(sent) == step.arriving
    for block in step.blocks:
        q, k = numbers(block.queries, queries), sent[numbers(block.keys, step.arriving)]
        assert len(q.unique()) == len(q)
        assert len(k.unique()) == len(k)
        runs = zip(q.split(block.sets.query_sizes), k.split(block.sets.key_sizes), strict=True)
        for rows, columns in runs:
            one = torch.ones(len(rows), len(columns), dtype=torch.int64)
            if block.sets.causal:
                assert len(rows) == len(columns)
                one = one.tril()
            seen[rows[:, None], columns] += one
    return seen


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 8, 13, 40, 1000])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_query_sees_once_what_is_before_it_and_in_its_window(ranks, window):
    lengths = [2 * ranks * n for n in (1, 7, 2, 4)]
    layouts = [RingLayout(lengths, ranks=ranks, rank=rank, device=CPU) for rank in range(ranks)]
    places = [positions(lengths, ranks, rank) for rank in range(ranks)]
    for rank in range(ranks):
        for distance, step in enumerate(layouts[rank].steps(window)):
            there = layouts[step.source].steps(window)[distance]
            assert (step.source, there.target) == ((rank - distance) % ranks, rank)
            sent = numbers(there.sent, len(places[rank]))
            assert there.leaving == len(sent)
            q, k = places[rank][:, None], places[step.source][None]
            behind = q[..., 1] - k[..., 1]
            expected = (q[..., 0] == k[..., 0]) & (behind >= 0) & (behind < (window or 1000))
            seen = seen_in(step, len(places[rank]), sent)
            assert torch.equal(seen, expected.long())
            assert set(sent.tolist()) == set(expected.any(0).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_step_has_the_same_work_and_needs_no_copy_of_a_single_sequence(ranks):
    for rank in range(ranks):
        own, *others = RingLayout([8 * ranks], ranks=ranks, rank=rank, device=CPU).steps(None)
        assert [block.sets.query_sizes for block in own.blocks] == [(8,)]
        for step in others:
            [block] = step.blocks
            assert block.sets.query_sizes[0] * block.sets.key_sizes[0] == 8 * 4
            assert all(isinstance(rows, slice) for rows in (step.sent, block.queries, block.keys))
            assert step.arriving == (4 if step.source < rank else 8)


def test_keys_outside_every_window_are_not_sent():
    layouts = [RingLayout([64], ranks=4, rank=rank, device=CPU) for rank in range(4)]
    leaving = [[step.leaving for step in layout.steps(4)[1:]] for layout in layouts]
    assert leaving == [[3, 0, 0], [3, 0, 3], [3, 0, 3], [0, 0, 3]]


def test_a_window_as_long_as_the_longest_sequence_is_none():
    layout = RingLayout([16, 8], ranks=2, rank=0, device=CPU)
    assert layout.steps(16) is layout.steps(None)
    assert layout.steps(15) is not layout.steps(None)


class Searched(RingLayout):
    """The layout with each piece compared to all others of its sequence, one by one."""

    def _seen(self, rank: int, source: int, window: int | None) -> list[list[_Piece]]:
        shares = accumulate((length // self._ranks for length in self._lengths), initial=0)
        found: dict[tuple[bool, int], list[_Piece]] = {}
        for share, length in zip(shares, self._lengths, strict=False):
            here: dict[tuple[bool, int], list[_Piece]] = {}
            for piece in _pieces(share, length, self._ranks, rank, source, window):
                number = 0
                while any(
                    common(piece.queries, other.queries) or common(piece.keys, other.keys)
                    for other in here.get((piece.triangle, number), [])
                ):
                    number += 1
                here.setdefault((piece.triangle, number), []).append(piece)
            for kind, pieces in here.items():
                found.setdefault(kind, []).extend(pieces)
        return list(found.values())


def written_out(steps: tuple[RingStep, ...]) -> list[object]:
    return [
        (
            [
                (b.sets.causal, b.sets.query_sizes, b.sets.key_sizes, plain(b.queries), plain(b.keys))
                for b in step.blocks
            ],
            (step.source, step.arriving, step.target, plain(step.sent), step.leaving),
        )
        for step in steps
    ]


def plain(rows: torch.Tensor | slice) -> object:
    return rows if isinstance(rows, slice) else rows.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_a_layout_is_that_of_comparing_all_pieces_with_one_another(seed):
    draw = random.Random(seed)
    ranks = draw.randint(2, 5)
    lengths = [2 * ranks * draw.randint(1, 20) for _ in range(draw.randint(1, 5))]
    window, rank = draw.randint(1, max(lengths)), draw.randrange(ranks)
    layout, searched = (kind(lengths, ranks=ranks, rank=rank, device=CPU) for kind in (RingLayout, Searched))
    assert written_out(layout.steps(window)) == written_out(searched.steps(window))


@pytest.mark.timeout(30)
def test_many_pieces_are_laid_out_in_a_time_that_grows_as_their_number():
    """Comparing each with all others takes minutes, and this half a second."""
    steps = RingLayout([2**15], ranks=2, rank=0, device=CPU).steps(4)
    assert sum(len(block.sets.query_sizes) for step in steps for block in step.blocks) > 8000  # pieces
