"""Packs trajectories end to end into micro-batches under a token budget."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
import torch
import xxhash
from torch import Tensor

from bus.errors import ConfigError
from bus.images import PlacedImage
from bus.kept_sets import KeptSets
from learner.data.prefix_tree import (
    PrefixTree,
    SegmentPath,
    chunks_within,
    computed_tokens,
    prefix_paths,
    prefix_tree,
)
from learner.data.streams import STREAMS, StreamValues, pack_streams
from learner.data.top_tokens import TopTokens, pack_top_tokens
from learner.host_memory.copies import to_device

OWN_CHOICE = -1
"""In the place of an expert: the learner's own router chooses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One trajectory to train on: L tokens, with values that the loss needs about each."""

    token_ids: np.ndarray
    """int32 [L]."""
    loss_mask: np.ndarray
    """bool [L], True on sampled tokens; the first token is never trained: nothing predicts it."""
    streams: Mapping[str, StreamValues]
    """Named values per token (learner/data/streams.py)."""
    update_slot: int = 0
    """When several updates share a batch, update `update_slot` modulo their number trains this sample."""
    group: int = 0
    """Number of the prompt; samples of one prompt share it."""
    episode: str = ""
    """Name of the episode; samples of one episode share it."""
    denominator: float | None = None
    """This sample's share of what the sum of all token losses is divided by; `None` stands for its number of
    trained tokens, which gives the mean over tokens."""
    kept: KeptSets | None = None
    """Kept sets of the L tokens, of which their log-probs are; None where all are of the whole vocabulary."""
    taught: TopTokens | None = None
    """The likeliest tokens of a teacher that compares distributions; None where it has none."""
    experts: np.ndarray | None = None
    """Experts that the learner is to send each token to, integers [n, layers, experts per token] of the first
    n tokens, `OWN_CHOICE` for none: of those that an engine chose the last token has none. None where the
    learner's own router chooses for all of them."""
    experts_recorded: bool = True
    """Whether the trajectory names them. Those that a pass has chosen are not part of the batch's digest."""
    images: tuple[PlacedImage, ...] = ()
    """Images among its tokens, with their bytes."""
    source: str = ""
    """Name of the data that its prompt is of; empty where that is not known."""
    name: str = "a sample"
    """Name of the sample in messages to people."""

    @property
    def trained_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask[1:]))

    @property
    def has_zero_advantages(self) -> bool:
        advantages = np.broadcast_to(self.streams["advantages"], len(self.token_ids))
        return not advantages[1:][self.loss_mask[1:]].any()

    def with_streams(self, **streams: StreamValues) -> Self:
        """Return this sample with further streams, or other values of those that it has."""
        return replace(self, streams={**self.streams, **streams})

    def xxh3(self) -> int:
        """Digest of all that is trained on but what passes have computed, 128 bits. A KL penalty in the
        reward enters the advantages, and so the digest, with what a pass has computed."""
        digest = xxhash.xxh3_128(self.token_ids.tobytes())
        digest.update(self.loss_mask.tobytes())
        for name in sorted(name for name in self.streams if STREAMS[name].recorded):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(self.streams[name], STREAMS[name].array_dtype).tobytes())
        if self.kept is not None:
            digest.update(self.kept.counts.tobytes())
            digest.update(self.kept.token_ids.tobytes())
        if self.experts is not None and self.experts_recorded:
            digest.update(self.experts.tobytes())
        for image in self.images:
            digest.update(f"{image.digest} at {image.start}".encode())
        return digest.intdigest()


def without_experts(samples: Iterable[Sample]) -> list[Sample]:
    """Return the samples for a pass of another model than the policy, whose experts they name."""
    return [replace(sample, experts=None) for sample in samples]


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """A pack of sequences, T tokens in all. Position t has the values about the prediction of token t + 1."""

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
    streams: dict[str, Tensor]
    """Named values [T] (learner/data/streams.py); those that no sample of the pack brought are missing."""
    trained: Tensor
    """int64 [N], the positions under `loss_mask`: only they need logits."""
    lengths: tuple[int, ...]
    """Lengths of the sequences, the differences of `cu_seqlens`, without waiting for the device."""
    names: tuple[str, ...] = ()
    """Name of the sample of each sequence."""
    kept: Tensor | None = None
    """int32 [T, K], the kept set of each label with -1 behind it; None where no label has one."""
    teacher_token_ids: Tensor | None = None
    """int32 [T, K], the likeliest tokens of a teacher in place of each label, with -1 for entries that are
    none; None where no sample has any."""
    teacher_logprobs: Tensor | None = None
    """float32 [T, K + 1] nats, what the teacher gives to these and to all others together; -inf for entries
    that are none."""
    experts: Tensor | None = None
    """int16 [T, layers, experts per token] that each token goes to, `OWN_CHOICE` where the learner's own
    router chooses, as for the last token of a sequence; None where it chooses for all tokens."""
    images: tuple[PlacedImage, ...] = ()
    """Images among the T tokens, in order."""
    denominator: float
    """Share of these sequences, and of samples that are left out, in what the sum of all token losses is
    divided by."""
    left_out_tokens: int = 0
    """Trained tokens of samples that are left out, since no gradient comes from them."""
    cut: tuple[int, ...] | None = None
    """In a rank's share, padded lengths of the sequences that are cut over context ranks, whose tokens come
    first; None where that is all of `lengths`."""
    whole: tuple[int, ...] = ()
    """In a rank's share with `cut`, padded lengths of the sequences that it has whole; `cu_seqlens` is of
    these."""
    tree: PrefixTree | None = None
    """Which tokens are computed for several sequences; `None` computes each token of each sequence."""

    @property
    def computed_tokens(self) -> int:
        return len(self.tokens if self.tree is None else self.tree.source)

    @property
    def images_apart(self) -> list[list[PlacedImage]]:
        """Return the images of each sequence, in their places among its own tokens."""
        ends = np.cumsum(self.lengths).tolist()
        starts = [0, *ends[:-1]]
        return [
            [image.moved(-start) for image in self.images if start <= image.start < end]
            for start, end in zip(starts, ends, strict=True)
        ]

    @property
    def predicting(self) -> Tensor:
        """Return the computed tokens that predict the trained ones, int64 [N]. One of them may predict
        several, each of another trajectory."""
        return self.trained if self.tree is None else self.tree.computed.index_select(0, self.trained)

    def to(self, device: torch.device) -> Self:
        moved = {field.name: getattr(self, field.name) for field in fields(self)}
        moved |= {k: to_device(v, device) for k, v in moved.items() if isinstance(v, Tensor)}
        moved["streams"] = {name: to_device(values, device) for name, values in self.streams.items()}
        moved["tree"] = None if self.tree is None else self.tree.to(device)
        return type(self)(**moved)

    def of_trained(self, name: str) -> Tensor:
        """Return the stream `name` at the trained positions, [N]; its fill where no sample brought it."""
        found = self.streams.get(name)
        if found is not None:
            return found.index_select(0, self.trained)
        return torch.full(
            self.trained.shape, STREAMS[name].fill, dtype=STREAMS[name].dtype, device=self.trained.device
        )


def pack_pairs(samples: Sequence[Sample], tokens_per_micro_batch: int) -> list[MicroBatch]:
    """Do what `pack` does with pairs of samples, each of which follow one another in one micro-batch."""
    pairs = list(zip(samples[::2], samples[1::2], strict=True))
    lengths = [sum(len(sample.token_ids) for sample in pair) for pair in pairs]
    bins = first_fit(lengths, tokens_per_micro_batch)
    return [micro_batch_of([sample for i in members for sample in pairs[i]]) for members in bins]


def pack(
    samples: Sequence[Sample], tokens_per_micro_batch: int, *, share_prefixes: bool = False
) -> list[MicroBatch]:
    """Put each sample, in order, into the first micro-batch with room; a larger one is alone in its own. With
    `share_prefixes`, the budget is of computed tokens, and samples of one prompt come together."""
    packs = numbered_packs(samples, tokens_per_micro_batch, share_prefixes=share_prefixes)
    return [micro_batch for _, micro_batch in packs]


def numbered_packs(
    samples: Sequence[Sample], tokens_per_micro_batch: int, *, share_prefixes: bool = False
) -> list[tuple[list[int], MicroBatch]]:
    """Return the micro-batches of `pack`, each with the numbers of its samples in their order there."""
    if not share_prefixes:
        bins = first_fit([len(sample.token_ids) for sample in samples], tokens_per_micro_batch)
        return [(members, micro_batch_of([samples[i] for i in members])) for members in bins]
    prompts = [sample.group for sample in samples]
    paths = prefix_paths([sample.token_ids for sample in samples], prompts)
    chunks = chunks_within(paths, prompts, tokens_per_micro_batch)
    costs = [computed_tokens([paths[i] for i in chunk]) for chunk in chunks]
    bins = [[i for n in found for i in chunks[n]] for found in first_fit(costs, tokens_per_micro_batch)]
    return [
        (members, micro_batch_of([samples[i] for i in members], [paths[i] for i in members]))
        for members in bins
    ]


def first_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return which of `lengths`, by index, share each bin of `budget`, each in the first bin with room."""
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
    """Return one token that is not trained: for a rank that has no more samples, but whose turn it is."""
    nothing = np.zeros(1, np.int32)
    return micro_batch_of([Sample(token_ids=nothing, loss_mask=nothing.astype(bool), streams={})])


def counting_left_out(micro_batches: Sequence[MicroBatch], left_out: Sequence[Sample]) -> list[MicroBatch]:
    """Return the micro-batches, of which the first counts samples that are left out: their trained tokens,
    and their share in the denominator."""
    if not left_out:
        return list(micro_batches)
    first, *others = micro_batches or [empty_micro_batch()]
    counted = replace(
        first,
        denominator=first.denominator + sum(map(_denominator, left_out)),
        left_out_tokens=sum(sample.trained_tokens for sample in left_out),
    )
    return [counted, *others]


def refuse_oversized(samples: Sequence[Sample], tokens_per_micro_batch: int) -> None:
    """Raise `ConfigError` with the name of the longest sample if it is over the budget."""
    longest = max(samples, key=lambda sample: len(sample.token_ids), default=None)
    if longest is not None and len(longest.token_ids) > tokens_per_micro_batch:
        raise ConfigError(
            f"{longest.name} has {len(longest.token_ids)} tokens, learner.batch.tokens_per_micro_batch is "
            f"{tokens_per_micro_batch}: raise it to {len(longest.token_ids)}, or set "
            "learner.batch.oversized=alone"
        )


def micro_batch_of(samples: Sequence[Sample], paths: Sequence[SegmentPath] | None = None) -> MicroBatch:
    """Lay `samples` end to end; with their `paths`, in depth-first order, common segments are shared."""
    lengths = [len(sample.token_ids) for sample in samples]
    sequence_of_token = np.repeat(np.arange(len(samples)), lengths)
    loss_mask = np.concatenate(_shifted([sample.loss_mask for sample in samples]))
    taught = pack_top_tokens([sample.taught for sample in samples], lengths)
    return MicroBatch(
        tokens=_tensor([sample.token_ids for sample in samples], torch.int64),
        position_ids=_tensor([np.arange(n) for n in lengths], torch.int64),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)),
        sequence_of_token=torch.from_numpy(sequence_of_token),
        labels=_tensor(_shifted([sample.token_ids for sample in samples]), torch.int64),
        loss_mask=torch.from_numpy(loss_mask),
        streams=pack_streams([sample.streams for sample in samples], lengths),
        trained=torch.from_numpy(np.flatnonzero(loss_mask)),
        lengths=tuple(lengths),
        names=tuple(sample.name for sample in samples),
        kept=_kept(samples),
        teacher_token_ids=None if taught is None else taught[0],
        teacher_logprobs=None if taught is None else taught[1],
        experts=_experts(samples),
        images=_images(samples, lengths),
        denominator=float(sum(_denominator(sample) for sample in samples)),
        tree=None if paths is None else prefix_tree(paths),
    )


def _kept(samples: Sequence[Sample]) -> Tensor | None:
    """Return the kept sets of the trained labels, where each is predicted; None where there is none."""
    if all(sample.kept is None for sample in samples):
        return None
    sets = [
        KeptSets.none(len(sample.token_ids)) if sample.kept is None else sample.kept.only(sample.loss_mask)
        for sample in samples
    ]
    counts = np.concatenate(_shifted([each.counts for each in sets]))
    if not counts.any():
        return None
    firsts = [each.counts[0] for each in sets]  # nothing predicts the first token, which is not trained
    ids = [each.token_ids[int(first) :] for each, first in zip(sets, firsts, strict=True)]
    return torch.from_numpy(KeptSets(counts, np.concatenate(ids)).padded())


def _experts(samples: Sequence[Sample]) -> Tensor | None:
    """Return where each token is to go; None where no sample says so."""
    shape = next((sample.experts.shape[1:] for sample in samples if sample.experts is not None), None)
    if shape is None:
        return None
    found = np.full((sum(len(sample.token_ids) for sample in samples), *shape), OWN_CHOICE, np.int16)
    start = 0
    for sample in samples:
        if sample.experts is not None:
            if sample.experts.shape[1:] != shape:
                raise ConfigError(
                    f"{sample.name} names experts for {sample.experts.shape[1:]} layers and experts a token, "
                    f"others for {shape}: they are of different models; set learner.router_replay=none"
                )
            found[start : start + len(sample.experts)] = sample.experts
        start += len(sample.token_ids)
    return torch.from_numpy(found)


def _images(samples: Sequence[Sample], lengths: Sequence[int]) -> tuple[PlacedImage, ...]:
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    moved = ((sample, start) for sample, start in zip(samples, starts, strict=True) if sample.images)
    return tuple(image.moved(start) for sample, start in moved for image in sample.images)


def _denominator(sample: Sample) -> float:
    return sample.trained_tokens if sample.denominator is None else sample.denominator


def _shifted(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Move each array one to the left, to where its values are predicted; the end becomes 0."""
    return [np.append(array[1:], array.dtype.type(0)) for array in arrays]


def _tensor(arrays: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays)).to(dtype)
