"""Reads what an SGLang server answers about tokens that others sampled: log-probs, and the likeliest tokens.

Of a request with `logprob_start_len` s the answer has one entry for each token from s on, in order, about
that token itself given all before it; the first entry has no log-prob. They are of the whole vocabulary at
temperature 1, whatever the request's temperature and nucleus are."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, JsonValue, ValidationError

from bus.errors import EngineError, RequestRefusedError
from bus.trajectory import LARGEST_LOGPROB
from learner.data.top_tokens import NO_TOKEN

BAD_REQUEST = 400
MOST_MASS = 1.01
"""Largest sum of probabilities of different tokens, which rounding lets pass 1."""
LEAST_MASS = 1e-7
"""Smallest probability that is told from 0 for the tokens that are not among the likeliest: theirs is 1 less
the sum of the others, which come in float32."""
Entry: TypeAlias = tuple[float | None, int, str | None]
"""A log-prob in nats, None for NaN and where there is none; the token; its text, if that was asked for."""
Entries: TypeAlias = Sequence[Entry]
"""An entry for each token of a request from its `logprob_start_len` on."""
Tops: TypeAlias = Sequence[Sequence[Entry] | None]
"""The likeliest tokens in place of each of these; empty where they were not asked for."""


class _Meta(BaseModel):
    input_token_logprobs: list[Entry]
    input_top_logprobs: list[list[Entry] | None] | None = None
    finish_reason: Mapping[str, JsonValue] | None = None


class _Answer(BaseModel):
    meta_info: _Meta


class AbortedError(EngineError):
    """The server gave a request up, which it may not do another time."""


def read_entries(raw: bytes, token_ids: Sequence[int], *, with_tops: bool) -> tuple[Entries, Tops]:
    """Return the entries of these tokens, and those of the likeliest tokens in place of each, if asked for.

    `token_ids` are those of the request from its `logprob_start_len` on. Raises `AbortedError` when the
    server gave it up, `RequestRefusedError` when it will do so each time, and `EngineError` for what is no
    such answer, and for one about other tokens."""
    try:
        meta = _Answer.model_validate_json(raw).meta_info
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise EngineError(
            f"the answer is not one of SGLang's /generate: {where}: {problem['msg']}: is it such a server?"
        ) from error
    finish = meta.finish_reason or {}
    if finish.get("type") == "abort" and finish.get("status_code") == BAD_REQUEST:
        raise RequestRefusedError(f"the server refused the request: {finish.get('message', finish)}")
    if finish.get("type") == "abort":
        raise AbortedError(f"the server gave the request up: {finish.get('message', finish)}")
    entries, tops = meta.input_token_logprobs, meta.input_top_logprobs or []
    if len(entries) != len(token_ids) or len(tops) != len(token_ids) * with_tops:
        raise EngineError(
            f"{len(token_ids)} tokens came back with {len(entries)} log-probs and {len(tops)} sets of the "
            "likeliest tokens: is it an SGLang server from 0.5.17 on?"
        )
    highest = max(token_ids, default=0)
    for asked, (_, told, _) in zip(token_ids, entries, strict=True):
        # SGLang writes 0 for the last id of its vocabulary
        if told != asked and not (told == 0 and asked == highest):
            raise EngineError(f"the log-probs are of other tokens than those sent: {told} instead of {asked}")
    return entries, tops


def read_logprobs(entries: Entries) -> NDArray[np.float32]:
    """Return the log-probs of these entries, float32 [N]. Raises `EngineError` for NaN, infinity and
    probabilities above 1."""
    logprobs = np.array([entry[0] for entry in entries], np.float32)  # None becomes NaN
    wrong = np.flatnonzero(~(np.isfinite(logprobs) & (logprobs <= LARGEST_LOGPROB)))
    if len(wrong):
        raise EngineError(
            f"log-prob {wrong[0]} of {len(logprobs)} is {logprobs[wrong[0]]}: are the server's weights "
            "finite, and is its precision wide enough?"
        )
    return logprobs


def read_top_tokens(
    tops: Tops, *, count: int, vocab_size: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the `count` likeliest tokens in N places, int32 [N, count], and nats of them and of all others
    together, float32 [N, count + 1].

    A token from `vocab_size` on, which the policy does not have, counts among the others. Raises
    `EngineError` for another number of tokens, for one that comes twice or is negative, and for log-probs
    that are not finite or are none of one distribution."""
    if short := [len(place or ()) for place in tops if len(place or ()) != count]:
        raise EngineError(f"{short[0]} of the likeliest tokens came instead of {count}")
    if not tops:
        return np.empty((0, count), np.int32), np.empty((0, count + 1), np.float32)
    logprobs = np.stack([read_logprobs(place or ()) for place in tops])
    ids = np.array([[entry[1] for entry in place or ()] for place in tops], np.int64)
    ordered = np.sort(ids, axis=1)
    for place in np.flatnonzero((ordered[:, 0] < 0) | (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)):
        raise EngineError(
            f"of the likeliest tokens in one place some come twice or are negative: {ids[place].tolist()}"
        )
    sums = np.exp(logprobs.astype(np.float64)).sum(axis=1)
    if (sums > MOST_MASS).any():
        raise EngineError(
            f"the {count} likeliest tokens in one place have a probability of {sums.max():.6g} together: "
            "their log-probs are of no distribution"
        )
    known = ids < vocab_size
    mass = np.where(known, np.exp(logprobs.astype(np.float64)), 0.0).sum(axis=1)
    others = np.log(np.maximum(1.0 - mass, LEAST_MASS))
    others[known.sum(axis=1) == vocab_size] = -np.inf  # then there are none
    return (
        np.where(known, ids, NO_TOKEN).astype(np.int32),
        np.column_stack((np.where(known, logprobs, -np.inf), others)).astype(np.float32),
    )
