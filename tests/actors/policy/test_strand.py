"""A trajectory takes from an engine one log-prob and one version for each token, and nothing else."""

from array import array

import numpy as np
import pytest

from actors.engines.base import Generation, Sampling
from actors.policy.strand import Call, Strand
from bus.errors import EngineError

CALL = Call(0, "solver", "default", Sampling(max_new_tokens=4), True)


@pytest.mark.parametrize(
    ("logprobs", "versions", "told"),
    [
        ([-0.5], [4, 4, 4], r"token ids of shape \[3\], log-probs of shape \[1\]"),
        ([-0.5] * 3, [4], r"token ids of shape \[3\], .* policy versions of shape \[1\]"),
        (-0.5, [4, 4, 4], r"log-probs of shape \[\]"),
        ([-0.5] * 2, [4, 4, 4], r"log-probs of shape \[2\]"),
        ([-0.5] * 3, [4, 4, 4], r"versions of keys and values of shape \[1\]"),
    ],
)
def test_one_value_for_several_tokens_is_refused(logprobs, versions, told):
    generation = Generation(
        np.array([1, 2, 3], np.int32), np.array(logprobs, np.float32), np.array(versions, np.int32), "stop",
        kv_versions=np.array([3], np.int32),
    )  # fmt: skip
    strand = Strand(0, "solver", "default", None)
    with pytest.raises(EngineError, match=told):
        strand.extend(array("i", [7]), generation, CALL)
    assert not strand.tokens


def test_no_token_has_no_values():
    empty = Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "abort")
    strand = Strand(0, "solver", "default", None)
    strand.extend(array("i", [7]), empty, CALL)
    assert strand.tokens.tolist() == [7]
