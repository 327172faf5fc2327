"""Trajectories laid end to end in micro-batches under a token budget."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
import xxhash
from torch import Tensor

from bus.errors import ConfigError
from learner.transfer import to_device


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One trajectory to train on: L tokens, and what the loss needs to know about each."""

    token_ids: np.ndarray
    """int32 [L]."""
    loss_mask: np.ndarray
    """bool [L], True on sampled tokens; the first token is never trained: nothing predicts it."""
    behaviour_logprobs: np.ndarray
    """float32 [L], nats, under the weights that sampled the token."""
    policy_versions: np.ndarray
    """int32 [L], the weights behind each token."""
    advantage: float
    """Of the whole trajectory."""
    name: str = "a sample"
    """For messages to people."""

    def xxh3(self) -> int:
        """Digest of all that is trained on, 128 bits."""
        digest = xxhash.xxh3_128()
        for array in (self.token_ids, self.loss_mask, self.behaviour_logprobs, self.policy_versions):
            digest.update(array.tobytes())
        digest.update(np.float32(self.advantage).tobytes())
        return digest.intdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Sequences of a pack of T tokens; position t carries what concerns predicting token t + 1."""

    tokens: Tensor
    """int64 [T]."""
    position_ids: Tensor
    """int64 [T], from 0 in each sequence."""
    cu_seqlens: Tensor
    """int32 [sequences + 1], where each sequence starts, and T."""
    sequence_of_token: Tensor
    """int64 [T], which sequence of the pack a token belongs to."""
    labels: Tensor
    """int64 [T], the next token of the same sequence; 0 at its end."""
    loss_mask: Tensor
    """bool [T], True where the label is trained; False at the end of each sequence."""
    behaviour_logprobs: Tensor
    """float32 [T], nats, of the label."""
    policy_versions: Tensor
    """int32 [T], the weights that sampled the label."""
    advantages: Tensor
    """float32 [T], that of the trajectory at each of its tokens."""
    trained: Tensor
    """int64 [N], the positions under `loss_mask`: only they need logits."""
    lengths: tuple[int, ...]
    """The differences of `cu_seqlens`, known without asking the device."""

    def to(self, device: torch.device) -> Self:
        """Copy to `device`; a no-op when already there."""
        moved = {field.name: getattr(self, field.name) for field in fields(self)}
        moved |= {k: to_device(v, device) for k, v in moved.items() if isinstance(v, Tensor)}
        return type(self)(**moved)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedTokens:
    """What a token-level loss knows of the N tokens that a micro-batch trains."""

    labels: Tensor
    """int64 [N]."""
    behaviour_logprobs: Tensor
    """float32 [N], nats."""
    policy_versions: Tensor
    """int32 [N], the weights that sampled each."""
    advantages: Tensor
    """float32 [N]."""
    loss_mask: Tensor
    """bool [N], all True."""

    @classmethod
    def of(cls, batch: MicroBatch) -> Self:
        """The tokens at `batch.trained`."""
        return cls(**{field.name: getattr(batch, field.name)[batch.trained] for field in fields(cls)})

    def __getitem__(self, rows: slice) -> Self:
        return type(self)(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


def pack(
    samples: Sequence[Sample], tokens_per_micro_batch: int, *, refuse_oversized: bool = False
) -> list[MicroBatch]:
    """Put each sample, in order, into the first micro-batch with room; a larger one is alone in its own.

    With `refuse_oversized` that raises `ConfigError` instead.
    """
    if refuse_oversized:
        _refuse_oversized(samples, tokens_per_micro_batch)
    bins: list[list[Sample]] = []
    free: list[int] = []
    for sample in samples:
        length = len(sample.token_ids)
        chosen = next((i for i, room in enumerate(free) if room >= length), None)
        if chosen is None:
            bins.append([sample])
            free.append(tokens_per_micro_batch - length)
        else:
            bins[chosen].append(sample)
            free[chosen] -= length
    return [_micro_batch(members) for members in bins]


def empty_micro_batch() -> MicroBatch:
    """One token that is not trained: for a rank that has no more samples, but whose turn it is."""
    nothing = np.zeros(1, np.int32)
    return _micro_batch(
        [
            Sample(
                token_ids=nothing,
                loss_mask=nothing.astype(bool),
                behaviour_logprobs=nothing.astype(np.float32),
                policy_versions=nothing,
                advantage=0.0,
            )
        ]
    )


def _refuse_oversized(samples: Sequence[Sample], tokens_per_micro_batch: int) -> None:
    longest = max(samples, key=lambda sample: len(sample.token_ids), default=None)
    if longest is not None and len(longest.token_ids) > tokens_per_micro_batch:
        raise ConfigError(
            f"{longest.name} has {len(longest.token_ids)} tokens, learner.batch.tokens_per_micro_batch is "
            f"{tokens_per_micro_batch}: raise it to {len(longest.token_ids)}, or set "
            "learner.batch.oversized=alone"
        )


def _micro_batch(samples: Sequence[Sample]) -> MicroBatch:
    lengths = [len(sample.token_ids) for sample in samples]
    sequence_of_token = np.repeat(np.arange(len(samples)), lengths)
    loss_mask = _shifted([sample.loss_mask for sample in samples])
    return MicroBatch(
        tokens=_tensor([sample.token_ids for sample in samples], torch.int64),
        position_ids=_tensor([np.arange(n) for n in lengths], torch.int64),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)),
        sequence_of_token=torch.from_numpy(sequence_of_token),
        labels=_tensor(_shifted([sample.token_ids for sample in samples]), torch.int64),
        loss_mask=_tensor(loss_mask, torch.bool),
        behaviour_logprobs=_tensor(_shifted([s.behaviour_logprobs for s in samples]), torch.float32),
        policy_versions=_tensor(_shifted([s.policy_versions for s in samples]), torch.int32),
        advantages=torch.from_numpy(np.array([s.advantage for s in samples], np.float32)[sequence_of_token]),
        trained=torch.from_numpy(np.flatnonzero(np.concatenate(loss_mask))),
        lengths=tuple(lengths),
    )


def _shifted(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Move each array one to the left, to where its values are predicted; the end becomes 0."""
    return [np.append(array[1:], array.dtype.type(0)) for array in arrays]


def _tensor(arrays: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays)).to(dtype)
