"""Tells what the learner knows of each token besides its id and whether it is trained: named streams.

A stream that is added to `STREAMS` is packed, shifted, cut over context-parallel ranks, moved to the device
and given to the loss by its name; nothing else has to be edited."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

StreamValues = np.ndarray | float
"""Says what a sample brings of a stream: [L], entry i about token i, or one value for all of its tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """Says how one kind of value per token is stored and laid out."""

    dtype: torch.dtype = torch.float32
    fill: float = 0.0
    """Value of tokens about which nothing is known: padding, and samples that do not bring the stream."""
    shifted: bool = True
    """Entry i concerns token i and is used where that token is predicted, one position earlier; otherwise
    entry i concerns position i itself."""
    recorded: bool = True
    """The stream is part of the batch's digest; what a pass computes is not, since its last bits depend on
    how ranks share the model."""

    @property
    def array_dtype(self) -> np.dtype[Any]:
        """Return the dtype of its values in numpy."""
        return torch.empty(0, dtype=self.dtype).numpy().dtype


STREAMS = {
    "behaviour_logprobs": Stream(),  # nats, under the weights that sampled the token
    "policy_versions": Stream(dtype=torch.int32),  # the weights that sampled the token
    "temperatures": Stream(fill=1.0),  # divided the logits when the token was sampled
    "over_older_kv": Stream(
        dtype=torch.bool, recorded=False
    ),  # keys and values of other weights were behind it
    "sampled_untrained": Stream(dtype=torch.bool, recorded=False),  # an engine sampled it; it is not trained
    "advantages": Stream(),
    "loss_weights": Stream(fill=1.0),  # the token's share of the loss (learner/algorithms/aggregation.py)
    "group_weights": Stream(
        fill=1.0
    ),  # of the group's loss, since some groups are drawn more often than others
    "proximal_logprobs": Stream(fill=np.nan, recorded=False),  # nats, under the policy before the step
    "reference_logprobs": Stream(fill=np.nan, recorded=False),  # nats, under the frozen reference policy
    "picked_by_covariance": Stream(fill=np.nan, recorded=False),  # 1 or 0 (learner/algorithms/selection.py)
    "beyond_second_moment": Stream(fill=np.nan, recorded=False),  # 1 or 0 (learner/algorithms/selection.py)
    "teacher_logprobs": Stream(fill=np.nan, recorded=False),  # nats, mean of the teachers' by their weights
    "teacher_coefs": Stream(recorded=False),  # sum of the weights of the teachers that the token has
    "reverse_kl_coefs": Stream(recorded=False),  # weight of KL(policy || teacher) over the teacher's top k
    "forward_kl_coefs": Stream(recorded=False),  # weight of KL(teacher || policy) over the teacher's top k
    "following_tokens": Stream(dtype=torch.int64, fill=-1, recorded=False),  # behind the label, for MTP heads
    "values": Stream(fill=np.nan, recorded=False),  # of the state before the token, by the critic
    "value_targets": Stream(fill=np.nan, recorded=False),  # what values should be; NaN where none is learned
}


def pack_streams(samples: Sequence[Mapping[str, StreamValues]], lengths: Sequence[int]) -> dict[str, Tensor]:
    """Lay the streams of samples end to end, [T] each, where their values are used.

    Streams that no sample brings are left out. Raises `KeyError` for a name that is not declared, and
    `ValueError` for an array of another length than its sample."""
    names = dict.fromkeys(name for sample in samples for name in sample)
    return {name: _packed(STREAMS[name], name, samples, lengths) for name in names}


def _packed(
    stream: Stream, name: str, samples: Sequence[Mapping[str, StreamValues]], lengths: Sequence[int]
) -> Tensor:
    packed = np.full(sum(lengths), stream.fill, dtype=stream.array_dtype)
    start = 0
    for sample, length in zip(samples, lengths, strict=True):
        values = sample.get(name, stream.fill)
        # The last position of a sequence predicts nothing, so a shifted stream keeps its fill there.
        target = packed[start : start + length - stream.shifted]
        if isinstance(values, np.ndarray):
            if len(values) != length:
                raise ValueError(f"stream {name!r} has {len(values)} values for a sample of {length} tokens")
            target[:] = values[1:] if stream.shifted else values  # memory may be a file mapped for reading
        else:
            target[:] = values
        start += length
    return torch.from_numpy(packed)
