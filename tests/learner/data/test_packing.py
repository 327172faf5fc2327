import numpy as np
import torch

from learner.data.packing import Sample, pack
from tests.learner.tiny import random_samples


def test_samples_go_in_order_to_the_first_micro_batch_with_room():
    batches = pack(random_samples([6, 5, 3, 20, 4, 1]), 10)
    assert [batch.lengths for batch in batches] == [(6, 3, 1), (5, 4), (20,)]


def test_nothing_makes_no_micro_batch():
    assert pack([], 10) == []


def test_position_t_carries_what_concerns_predicting_token_t_plus_one():
    first = Sample(
        token_ids=np.array([10, 11, 12], np.int32),
        loss_mask=np.array([True, False, True]),
        streams={
            "behaviour_logprobs": np.array([9.0, 0.0, -0.5], np.float32),
            "policy_versions": np.array([0, 0, 7], np.int32),
            "advantages": 2.0,
        },
    )
    second = Sample(
        token_ids=np.array([20, 21], np.int32),
        loss_mask=np.array([False, True]),
        streams={
            "behaviour_logprobs": np.array([0.0, -0.25], np.float32),
            "policy_versions": np.array([0, 8], np.int32),
            "advantages": -1.0,
            "temperatures": 0.5,
        },
    )
    [batch] = pack([first, second], 100)
    assert batch.tokens.tolist() == [10, 11, 12, 20, 21]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 5]
    assert batch.sequence_of_token.tolist() == [0, 0, 0, 1, 1]
    assert batch.labels.tolist() == [11, 12, 0, 21, 0]
    assert batch.loss_mask.tolist() == [False, True, False, True, False]
    assert batch.trained.tolist() == [1, 3]
    assert batch.streams["behaviour_logprobs"].tolist() == [0.0, -0.5, 0.0, -0.25, 0.0]
    assert batch.streams["policy_versions"].tolist() == [0, 7, 0, 8, 0]
    assert batch.streams["advantages"].tolist() == [2.0, 2.0, 0.0, -1.0, 0.0]
    assert batch.streams["temperatures"].tolist() == [1.0, 1.0, 1.0, 0.5, 1.0]
    assert "reference_logprobs" not in batch.streams
    assert batch.of_trained("reference_logprobs").isnan().all()
    assert batch.denominator == 2.0


def test_dtypes_are_those_promised():
    [batch] = pack(random_samples([4]), 10)
    assert (batch.tokens.dtype, batch.labels.dtype, batch.trained.dtype) == (torch.int64,) * 3
    assert (batch.cu_seqlens.dtype, batch.streams["policy_versions"].dtype) == (torch.int32,) * 2
    assert batch.streams["behaviour_logprobs"].dtype == batch.streams["advantages"].dtype == torch.float32
    assert batch.loss_mask.dtype == torch.bool
