"""Kept sets stay with their tokens when generations are joined and cut."""

import numpy as np

from actors.engines.base import NOTHING, Generation, GenerationRequest, Sampling
from actors.engines.continued_generation import joined
from actors.policy.stop_strings import generate_until
from bus.kept_sets import KeptSets


def piece(*sets: list[int], reason: str = "length") -> Generation:
    """A generation of the first token of each set."""
    kept = KeptSets.of([np.array(each, np.int32) for each in sets])
    tokens = np.array([each[0] for each in sets], np.int32)
    return Generation(
        tokens, np.zeros(len(sets), np.float32), np.zeros(len(sets), np.int32), reason, None, kept
    )


def test_sets_of_pieces_follow_one_another():
    plain = Generation(*(np.zeros(2, kind) for kind in (np.int32, np.float32, np.int32)), "abort")
    whole = joined([NOTHING, piece([1, 2], [3]), plain, piece([4])])
    assert whole.kept.counts.tolist() == [2, 1, 0, 0, 1]
    assert whole.kept.token_ids.tolist() == [1, 2, 3, 4]
    assert whole.token_ids.tolist() == [1, 3, 0, 0, 4]
    assert whole.finish_reason == "length"
    assert joined([NOTHING, plain]).kept is None
    assert joined([]) is NOTHING


async def test_what_a_stop_string_cuts_off_loses_its_sets():
    pieces = [piece([1, 9], [2]), piece([3, 4, 5], [6, 7])]
    request = GenerationRequest("a", [0], Sampling(max_new_tokens=8, top_k=3, keep_masks=True))

    async def generate(_: GenerationRequest) -> Generation:
        return pieces.pop(0)

    async def after_three(tokens: list[int]) -> int | None:
        return 3 if len(tokens) > 3 else None

    found = await generate_until(generate, request, after_three)
    assert found.token_ids.tolist() == [1, 2, 3]
    assert found.kept.counts.tolist() == [2, 1, 3]
    assert found.kept.token_ids.tolist() == [1, 9, 2, 3, 4, 5]
