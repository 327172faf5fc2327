"""Trajectories laid end to end in micro-batches under a token budget."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from bus.errors import ConfigError
from learner.publication.transfer import to_device


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
    advantage: float | NDArray[np.floating]
    """Of the whole trajectory, or [L], of each token."""
    part: int = 0
    """Of several updates that share a batch this modulo their number is the one that trains it."""
    name: str = "a sample"
    """For messages to people."""
    proximal_logprobs: np.ndarray | None = None
    """float32 [L], nats, under the policy before the step, once logprob_passes.py computed them."""
    reference_logprobs: np.ndarray | None = None
    """float32 [L], nats, under the reference policy, likewise."""
    teacher_logprobs: np.ndarray | None = None
    """float32 [L], nats, under the teacher, likewise."""

    @property
    def advantages(self) -> NDArray[np.float32]:
        """float32 [L]."""
        return np.broadcast_to(np.asarray(self.advantage, np.float32), len(self.token_ids))

    def xxh3(self) -> int:
        """Digest of all that is trained on and comes from outside, 128 bits."""
        digest = xxhash.xxh3_128()
        for array in (self.token_ids, self.loss_mask, self.behaviour_logprobs, self.policy_versions):
            digest.update(array.tobytes())
        digest.update(np.asarray(self.advantage, np.float32).tobytes())
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
    """float32 [T], of the label."""
    proximal_logprobs: Tensor
    """float32 [T], nats, of the label under the policy before the step; NaN where no pass has taken it."""
    reference_logprobs: Tensor
    """float32 [T], nats, under the reference policy, likewise."""
    teacher_logprobs: Tensor
    """float32 [T], nats, under the teacher, likewise."""
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
    proximal_logprobs: Tensor
    """float32 [N], nats; NaN where no pass has taken them."""
    reference_logprobs: Tensor
    """float32 [N], nats, likewise."""
    teacher_logprobs: Tensor
    """float32 [N], nats, likewise."""
    loss_mask: Tensor
    """bool [N], all True."""

    @classmethod
    def of(cls, batch: MicroBatch) -> Self:
        """The tokens at `batch.trained`."""
        return cls(**{field.name: getattr(batch, field.name)[batch.trained] for field in fields(cls)})

    def __getitem__(self, rows: slice) -> Self:
        return type(self)(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


def pack(samples: Sequence[Sample], tokens_per_micro_batch: int) -> list[MicroBatch]:
    """Put each sample, in order, into the first micro-batch with room; a larger one is alone in its own."""
    bins = first_fit([len(sample.token_ids) for sample in samples], tokens_per_micro_batch)
    return [micro_batch_of([samples[i] for i in members]) for members in bins]


def first_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Which of `lengths`, by their index, share each bin of `budget`."""
    bins: list[list[int]] = []
    free: list[int] = []
    for i, length in enumerate(lengths):
        chosen = next((j for j, room in enumerate(free) if room >= length), None)
        if chosen is None:
            bins.append([i])
            free.append(budget - length)
        else:
            bins[chosen].append(i)
            free[chosen] -= length
    return bins


def empty_micro_batch() -> MicroBatch:
    """One token that is not trained: for a rank that has no more samples, but whose turn it is."""
    nothing = np.zeros(1, np.int32)
    return micro_batch_of(
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


def refuse_oversized(samples: Sequence[Sample], tokens_per_micro_batch: int) -> None:
    """Raise `ConfigError` with the name of the longest sample if it is over the budget."""
    longest = max(samples, key=lambda sample: len(sample.token_ids), default=None)
    if longest is not None and len(longest.token_ids) > tokens_per_micro_batch:
        raise ConfigError(
            f"{longest.name} has {len(longest.token_ids)} tokens, learner.batch.tokens_per_micro_batch is "
            f"{tokens_per_micro_batch}: raise it to {len(longest.token_ids)}, or set "
            "learner.batch.oversized=alone"
        )


def micro_batch_of(samples: Sequence[Sample]) -> MicroBatch:
    """Lay `samples` end to end."""
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
        advantages=_tensor(_shifted([s.advantages for s in samples]), torch.float32),
        proximal_logprobs=_of_a_pass([s.proximal_logprobs for s in samples], lengths),
        reference_logprobs=_of_a_pass([s.reference_logprobs for s in samples], lengths),
        teacher_logprobs=_of_a_pass([s.teacher_logprobs for s in samples], lengths),
        trained=torch.from_numpy(np.flatnonzero(np.concatenate(loss_mask))),
        lengths=tuple(lengths),
    )


def _of_a_pass(logprobs: Sequence[np.ndarray | None], lengths: Sequence[int]) -> Tensor:
    """Those of labels; NaN for a sample without."""
    nothing = np.float32(np.nan)
    found = [np.full(n, nothing) if x is None else x for x, n in zip(logprobs, lengths, strict=True)]
    return _tensor(_shifted(found), torch.float32)


def _shifted(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Move each array one to the left, to where its values are predicted; the end becomes 0."""
    return [np.append(array[1:], array.dtype.type(0)) for array in arrays]


def _tensor(arrays: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays)).to(dtype)
