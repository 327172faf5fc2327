"""Kept sets on the wire: what they say, and which of them cannot be."""

from dataclasses import replace

import numpy as np
import pytest

from bus.codec import decode, encode
from bus.config import MOST_KEPT
from bus.errors import SchemaError
from bus.kept_sets import KeptSets
from bus.trajectory import Trajectory
from tests.factories import make_trajectory

SETS = [[], [3, 5], [7], [], [1, 2, 4]]
KEPT = KeptSets.of([np.array(each, np.int32) for each in SETS])


def lists(kept: KeptSets) -> list[list[int]]:
    return [part.tolist() for part in np.split(kept.token_ids, np.cumsum(kept.counts, dtype=int)[:-1])]


def test_sets_are_joined_cut_filtered_and_laid_out():
    assert (KEPT.counts.tolist(), KEPT.owners.tolist()) == ([0, 2, 1, 0, 3], [1, 1, 2, 4, 4, 4])
    assert lists(KeptSets.joined([KEPT, KeptSets.none(2)])) == [*SETS, [], []]
    assert lists(KEPT.first(2)) == SETS[:2]
    assert lists(KEPT.only(np.array([True, False, True, True, True]))) == [[], [], [7], [], [1, 2, 4]]
    table = [[-1, -1, -1], [3, 5, -1], [7, -1, -1], [-1, -1, -1], [1, 2, 4]]
    assert KEPT.padded().tolist() == table
    assert KeptSets.none(2).padded().shape == (2, 0)


def recorded(*, tokens=(9, 5, 7, 9, 2), kept: KeptSets = KEPT) -> Trajectory:
    made = make_trajectory(tokens=5)
    return replace(
        made,
        token_ids=np.array(tokens, np.int32),
        kept_counts=kept.counts.tobytes(),
        kept_tokens=kept.token_ids.tobytes(),
    )


def test_kept_sets_arrive_as_they_were_recorded():
    found = decode(encode(recorded()), Trajectory)
    assert found.kept_sets is not None
    assert lists(found.kept_sets) == SETS
    assert decode(encode(make_trajectory()), Trajectory).kept_sets is None


TOO_LARGE = KeptSets.of([np.arange(MOST_KEPT + 1, dtype=np.int32), *[np.zeros(0, np.int32)] * 4])


@pytest.mark.parametrize(
    ("trajectory", "why"),
    [
        (recorded(tokens=(9, 4, 7, 9, 2)), "a token is not in its kept set"),
        (recorded(kept=KeptSets(KEPT.counts, np.array([5, 5, 7, 1, 2, 4], np.int32))), "or twice"),
        (recorded(kept=KeptSets(KEPT.counts, np.array([-1, 5, 7, 1, 2, 4], np.int32))), "a negative one"),
        (recorded(kept=KeptSets(KEPT.counts, KEPT.token_ids[:5])), "count other tokens than the 5"),
        (recorded(kept=KeptSets(KEPT.counts[1:], KEPT.token_ids)), "8 bytes of kept counts for 5 tokens"),
        (recorded(kept=TOO_LARGE), "over 1024 tokens"),
        (replace(recorded(), kept_counts=b""), "0 bytes of kept counts"),
        (replace(recorded(), kept_tokens=b"\0"), "bytes of kept counts"),
    ],
)
def test_sets_that_do_not_fit_their_tokens_are_refused(trajectory, why):
    with pytest.raises(SchemaError, match=why):
        decode(encode(trajectory), Trajectory)
