"""Passes that ask teachers for their likeliest tokens in place of each trained one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from learner.backends.contract.backend import Backend
from learner.config.frozen_policies import TeacherConfig
from learner.data.packing import Sample, numbered_packs, without_experts
from learner.data.top_tokens import NO_TOKEN, TopTokens


def with_top_tokens(
    backend: Backend, samples: Sequence[Sample], teachers: Mapping[str, TeacherConfig],
    answers: Mapping[str, Sequence[TopTokens]], *, tokens_per_micro_batch: int, share_prefixes: bool = False,
) -> list[Sample]:  # fmt: skip
    """Add the likeliest tokens of the teacher that each sample has, and the weight of their divergence.

    Every rank calls this. `teachers` have `kl = "top_k"` and sources that do not overlap; `answers` are those
    of the ones behind servers, which need no pass.
    """
    found = list(samples)
    for tag, teacher in teachers.items():
        taught = [i for i, sample in enumerate(samples) if teacher.teaches(sample.source)]
        if teacher.url is not None:
            tops = answers[tag]
        else:
            tops = score_top_tokens(
                backend,
                [samples[i] for i in taught],
                teacher.top_k or 0,
                policy=tag,
                tokens_per_micro_batch=tokens_per_micro_batch,
                share_prefixes=share_prefixes,
            )
        for i, top in zip(taught, tops, strict=True):
            with_coef = samples[i].with_streams(**{f"{teacher.direction}_kl_coefs": teacher.coef})
            found[i] = replace(with_coef, taught=top)
    return found


def score_top_tokens(
    backend: Backend, samples: Sequence[Sample], count: int, *, policy: str, tokens_per_micro_batch: int,
    share_prefixes: bool = False,
) -> list[TopTokens]:  # fmt: skip
    """Find the `count` likeliest tokens in place of each trained one. Every rank calls this.

    Args:
        backend: its weights are bit for bit the same afterwards.
        samples: the samples of this data-parallel rank, equal on the ranks that share a model with it.
        count: tokens in each place.
        policy: tag of a frozen policy.
        tokens_per_micro_batch: budget of a pack, by first fit; a longer sample is alone in its own.
        share_prefixes: compute once what samples of one prompt begin with.
    """
    packs = numbered_packs(without_experts(samples), tokens_per_micro_batch, share_prefixes=share_prefixes)
    with backend.frozen.in_place(policy):
        values_of = backend.top_tokens([batch for _, batch in packs], count)
    found: dict[int, TopTokens] = {}
    for (members, batch), values in zip(packs, values_of, strict=True):
        for i, of_sample in zip(members, torch.split(values, list(batch.lengths), dim=1), strict=True):
            found[i] = _top_tokens(of_sample, count)
    return [found[i] for i in range(len(samples))]


def _top_tokens(values: Tensor, count: int) -> TopTokens:
    """Shift by one: position t holds the prediction of token t + 1, and NaN where it is not trained."""
    first = torch.full((len(values), 1), torch.nan)
    by_token = torch.cat((first, values[:, :-1]), dim=1).numpy().T
    ids, logprobs = by_token[:, :count], by_token[:, count:]
    untrained = np.isnan(ids[:, :1])  # a log-prob of NaN at a trained token stays, and stops the step
    return TopTokens(
        np.where(untrained, NO_TOKEN, ids).astype(np.int32),
        np.where(untrained, -np.inf, logprobs).astype(np.float32),
    )
