"""Finds what trajectories of one prompt have in common from their first token on, so that it is computed
once.

Siblings of a group begin with the same prompt, and strands of an episode with the same turns. Such sequences
make a tree of segments. A sequence is the path of segments from a root to where it ends, and each segment is
computed once: a token depends on nothing but the tokens before it, which are the same for all paths through
it. Only the computation is shared. Each trajectory keeps its own log-probs, advantage and weight for every
token that it trains, whatever others train on the same segment."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bus.config import LEAST_SHARED
from learner.host_memory.copies import to_device
from storage.shard.shared_prefixes import common_length


class PrefixSegment(NamedTuple):
    """Tokens that follow each other in every sequence that has the first of them."""

    number: int
    """The segment's number in depth-first order, each segment before those that follow it."""
    length: int


SegmentPath = tuple[PrefixSegment, ...]
"""Segments of one sequence, in the order of the text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixTree:
    """Tells which of a pack's T tokens are computed, U in all, and which of these stands for each token."""

    source: Tensor
    """int64 [U], the token of the pack that each computed one is."""
    computed: Tensor
    """int64 [T], the computed token that stands for each token of the pack."""
    lengths: tuple[int, ...]
    """Lengths of the segments, which lie end to end in depth-first order."""
    parents: tuple[int, ...]
    """The segment before each segment; -1 for a root."""
    held: tuple[range, ...] = ()
    """Which of the segments' tokens, as they lie end to end, this rank computes, where ranks share them:
    `source` and `computed` then number these alone. Empty where it computes all."""

    def to(self, device: torch.device) -> Self:
        return replace(self, source=to_device(self.source, device), computed=to_device(self.computed, device))

    def share(self, held: tuple[range, ...]) -> Self:
        """Return the tree of a rank that computes these tokens; those of other ranks are numbered -1."""
        rows = torch.cat([torch.arange(each.start, each.stop) for each in held])
        number = torch.full_like(self.source, -1)
        number[rows] = torch.arange(len(rows))
        return replace(self, source=self.source[rows], computed=number[self.computed], held=held)

    def padded(self, multiple: int) -> Self:
        """Compute a multiple of so many tokens: the last segment, which none follows, is made longer."""
        missing = -len(self.source) % multiple
        return replace(
            self,
            source=torch.cat((self.source, self.source.new_zeros(missing))),
            lengths=(*self.lengths[:-1], self.lengths[-1] + missing),
        )


def prefix_paths(
    sequences: Sequence[NDArray[np.int32]], prompts: Sequence[int], *, least: int = LEAST_SHARED
) -> list[SegmentPath]:
    """Return the path of each sequence in the tree of those of its prompt.

    Args:
        sequences: int32 [L] each.
        prompts: number of the prompt of each; sequences of different prompts share nothing.
        least: fewest tokens of a segment that others follow."""
    paths: list[SegmentPath] = [()] * len(sequences)
    numbers = count()
    for members in _by_prompt(prompts):
        # Bytes of big-endian numbers are in the order of the numbers: what begins alike comes together.
        order = sorted(members, key=lambda i: sequences[i].astype(">i4").tobytes())
        ordered = [sequences[i] for i in order]
        for i, path in zip(order, _tree_paths(ordered, least, numbers), strict=True):
            paths[i] = path
    return paths


def chunks_within(paths: Sequence[SegmentPath], prompts: Sequence[int], budget: int) -> list[list[int]]:
    """Return the sequences of each prompt, by index, in as few chunks as compute at most `budget` tokens. A
    sequence over the budget is a chunk by itself. Each chunk is in depth-first order."""
    chunks: list[list[int]] = []
    for members in _by_prompt(prompts):
        begun: set[PrefixSegment] = set()
        room = -1
        for i in sorted(members, key=paths.__getitem__):
            if (added := _length(set(paths[i]) - begun)) > room:
                chunks.append([])
                begun, room, added = set(), budget, _length(paths[i])
            chunks[-1].append(i)
            begun.update(paths[i])
            room -= added
    return chunks


def computed_tokens(paths: Sequence[SegmentPath]) -> int:
    """Count the tokens of sequences whose common segments count once."""
    return _length({segment for path in paths for segment in path})


def prefix_tree(paths: Sequence[SegmentPath]) -> PrefixTree | None:
    """Lay the segments of sequences out, each once; `None` if no two sequences have one in common. The
    sequences come in depth-first order."""
    if computed_tokens(paths) == sum(_length(path) for path in paths):
        return None
    numbers: dict[int, int] = {}
    lengths: list[int] = []
    parents: list[int] = []
    first_row: list[int] = []
    source, computed = [], []
    token = rows = 0
    for path in paths:
        parent = -1
        for number, length in path:
            found = numbers.setdefault(number, len(lengths))
            if found == len(lengths):
                first_row.append(rows)
                lengths.append(length)
                parents.append(parent)
                source.append(torch.arange(token, token + length))
                rows += length
            computed.append(torch.arange(first_row[found], first_row[found] + length))
            token += length
            parent = found
    return PrefixTree(
        source=torch.cat(source), computed=torch.cat(computed), lengths=tuple(lengths), parents=tuple(parents)
    )


def _by_prompt(prompts: Sequence[int]) -> list[list[int]]:
    members: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        members.setdefault(prompt, []).append(i)
    return list(members.values())


def _length(segments: Sequence[PrefixSegment] | set[PrefixSegment]) -> int:
    return sum(segment.length for segment in segments)


def _tree_paths(
    ordered: Sequence[NDArray[np.int32]], least: int, numbers: Iterator[int]
) -> list[SegmentPath]:
    """Return the paths of sequences that are in lexicographic order.

    What all of a range of them begin with is a segment. The range is then divided where neighbours have no
    more in common than that, and so on."""
    common = [0, *(common_length(a, b) for a, b in pairwise(ordered))]
    paths: list[SegmentPath] = [()] * len(ordered)
    ranges: list[tuple[int, int, SegmentPath]] = [(0, len(ordered), ())]
    while ranges:
        begin, end, path = ranges.pop()
        is_one = end - begin == 1
        shared = len(ordered[begin]) if is_one else min(common[begin + 1 : end])
        more = shared - _length(path)
        if more >= (1 if is_one else least):
            path = (*path, PrefixSegment(next(numbers), more))
        if is_one:
            paths[begin] = path
            continue
        cuts = [begin, *(i for i in range(begin + 1, end) if common[i] == shared), end]
        parts = list(pairwise(cuts))
        ranges.extend((first, last, path) for first, last in reversed(parts))  # the first is popped first
    return paths
