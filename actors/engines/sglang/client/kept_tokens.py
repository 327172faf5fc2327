"""Which tokens SGLang kept where sampling cut others off, as 0.5.23 tells it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.engines.base import GenerationRequest
from bus.config import MOST_KEPT
from bus.errors import EngineError
from bus.kept_sets import KeptSets

SETS, LOGPROBS = "output_token_sampling_mask", "output_token_sampling_logprobs"
"""What an answer calls the kept ids of each token, and its log-prob among them."""
Sets = list[NDArray[np.int32]]


def read_kept(
    meta: Mapping[str, Any], tokens: NDArray[np.int32], logprobs: NDArray[np.float32],
    request: GenerationRequest,
) -> tuple[Sets, NDArray[np.float32]]:  # fmt: skip
    """Return the kept set of each token, and its log-prob among that.

    Equal logits at the edge are all kept, so that a set may have more tokens than were asked for. One of over
    `MOST_KEPT` is not recorded: it is returned empty, and its token with the log-prob of all tokens.

    Args:
        meta: what the server says of the request; its last entries are of these tokens.
        tokens: int32 [N].
        logprobs: [N] nats, of the whole vocabulary.
        request: it names the tokens in errors.

    Raises `EngineError` for sets that are missing, or lack their tokens."""
    if not len(tokens):
        return [], logprobs
    sets, selected = (list(meta.get(name) or ())[-len(tokens) :] for name in (SETS, LOGPROBS))
    if len(sets) != len(tokens) or len(selected) != len(tokens):
        raise EngineError(
            f"request {request.request_id}: {len(tokens)} tokens came with {len(sets)} sets of kept tokens "
            f"and {len(selected)} log-probs among them: sampling.keep_masks needs an SGLang that returns "
            "sampling masks, such as 0.5.23"
        )
    found: Sets = []
    within = logprobs.copy()
    for n, (ids, logprob) in enumerate(zip(_arrays(sets), selected, strict=True)):
        if tokens[n] not in ids or logprob is None or not np.isfinite(logprob):
            raise EngineError(
                f"request {request.request_id}: token {n} of {len(tokens)}, {tokens[n]}, has the log-prob "
                f"{logprob} among {len(ids)} kept tokens: are the weights finite?"
            )
        recorded = len(ids) <= MOST_KEPT
        found.append(ids if recorded else ids[:0])
        if recorded:
            within[n] = min(logprob, 0.0)
    return found, within


def _arrays(sets: Sequence[Sequence[int]]) -> Sets:
    return [np.unique(np.array(ids, np.int32)) for ids in sets]


def kept_sets(sets: Sets, request: GenerationRequest) -> KeptSets | None:
    """Return the sets of a generation; None where the request wants none."""
    return KeptSets.of(sets) if request.sampling.records_kept else None
