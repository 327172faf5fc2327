"""The likeliest tokens that a teacher gives at each trained position, with which the policy is compared."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NO_TOKEN = -1
"""Id of an entry that is none: at tokens that are not trained or not taught, and behind a smaller vocabulary.
"""


@dataclass(frozen=True, slots=True, eq=False)
class TopTokens:
    """The K likeliest tokens for each of L tokens' places, and what the teacher gives to all others."""

    token_ids: NDArray[np.int32]
    """int32 [L, K], with `NO_TOKEN` for entries that are none."""
    logprobs: NDArray[np.float32]
    """float32 [L, K + 1] nats, of these tokens and of all others together; -inf for entries that are none."""

    @classmethod
    def none(cls, tokens: int, count: int) -> "TopTokens":
        """Return entries for so many tokens of which none is taught."""
        return cls(
            np.full((tokens, count), NO_TOKEN, np.int32), np.full((tokens, count + 1), -np.inf, np.float32)
        )

    def widened(self, count: int) -> "TopTokens":
        """Return these with room for `count` tokens each, at least as many as there are."""
        missing = count - self.token_ids.shape[1]
        return TopTokens(
            np.pad(self.token_ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN),
            np.concatenate(
                [
                    self.logprobs[:, :-1],
                    np.full((len(self.logprobs), missing), -np.inf, np.float32),
                    self.logprobs[:, -1:],
                ],
                axis=1,
            ),
        )


def pack_top_tokens(
    samples: Sequence[TopTokens | None], lengths: Sequence[int]
) -> tuple[Tensor, Tensor] | None:
    """Lay those of samples end to end, int32 [T, K] and float32 [T, K + 1], each where it is predicted.
    Returns None where no sample has any."""
    count = max((each.token_ids.shape[1] for each in samples if each is not None), default=0)
    if count == 0:
        return None
    parts = [
        _predicted(TopTokens.none(length, count) if each is None else each.widened(count))
        for each, length in zip(samples, lengths, strict=True)
    ]
    return (
        torch.from_numpy(np.concatenate([part.token_ids for part in parts])),
        torch.from_numpy(np.concatenate([part.logprobs for part in parts])),
    )


def _predicted(top: TopTokens) -> TopTokens:
    """Move each entry one to the left, to where its token is predicted; the end has none."""
    end = TopTokens.none(1, top.token_ids.shape[1])
    return TopTokens(
        np.concatenate((top.token_ids[1:], end.token_ids)), np.concatenate((top.logprobs[1:], end.logprobs))
    )
