"""What a server answers to /generate, at once or as a stream of events: checked, and read as a `Generation`.
The tokens of a stream that have come stay when the server dies."""

import json
from array import array
from collections.abc import AsyncGenerator, AsyncIterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from actors.engines.base import Generation, GenerationRequest, WorkCounts
from actors.engines.expert_routing import Routing
from actors.engines.sglang.client.weight_labels import version_of
from bus.config import MOST_KEPT
from bus.errors import EngineError, RequestRefusedError
from bus.images import shown_tokens
from bus.kept_sets import KeptSets
from bus.trajectory import LARGEST_LOGPROB, FinishReason

SETS, LOGPROBS = "output_token_sampling_mask", "output_token_sampling_logprobs"
"""What an answer calls the kept ids of each token, and its log-prob among them."""
Sets = list[NDArray[np.int32]]
BAD_REQUEST = 400
REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
NOT_JSON = (ValueError, RecursionError)
"""What `json.loads` raises of bytes that are no JSON, or too deep."""
_NOT_OF_SGLANG = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading an answer raises that has other parts, or parts of other types, than SGLang's."""
_EVENT_END = b"\n\n"
_DATA = b"data: "
_LAST = b"[DONE]"


@contextmanager
def reading(request: GenerationRequest) -> Iterator[None]:
    """Inside, an answer that has not the form of SGLang's raises `EngineError`."""
    try:
        yield
    except _NOT_OF_SGLANG as error:
        raise EngineError(
            f"{_name(request)}: the answer is not one of SGLang's /generate: {error!r}"
        ) from error


def read_kept(
    meta: Mapping[str, Any], tokens: NDArray[np.int32], logprobs: NDArray[np.float32],
    request: GenerationRequest,
) -> tuple[Sets, NDArray[np.float32]]:  # fmt: skip
    """Return the kept set of each token, and the token's log-prob among that.

    Equal logits at the edge are all kept, so that a set may have more tokens than were asked for. One of over
    `MOST_KEPT` is not recorded: it is returned empty, and its token with the log-prob of all tokens.

    Args:
        meta: what the server says of the request; its last entries are of these tokens.
        tokens: int32 [N].
        logprobs: [N] nats, of the whole vocabulary.
        request: it names the tokens in errors.

    Raises `EngineError` for sets that are missing, lack their tokens or have negative ones, and for log-probs
    that are none."""
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
        is_logprob = logprob is not None and -np.inf < logprob <= LARGEST_LOGPROB
        if tokens[n] not in ids or ids[0] < 0 or not is_logprob:
            raise EngineError(
                f"request {request.request_id}: token {n} of {len(tokens)}, {tokens[n]}, has the log-prob "
                f"{logprob} among {len(ids)} kept tokens {ids[:3].tolist()}...: are the weights finite?"
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


def read_answer(
    answer: Mapping[str, Any], request: GenerationRequest, routing: Routing | None = None
) -> Generation:
    """Return the tokens of an answer with their log-probs, versions and, of a model with `routing`, experts.

    Raises `EngineError` for an answer that cannot be a generation: log-probs that are not finite or not one
    for each token, versions that are none of ours, experts that are none of the model's, a finish reason that
    is an error; `RequestRefusedError` when the server says that it can never serve it."""
    with reading(request):
        meta = answer["meta_info"]
        tokens = np.array(answer["output_ids"], np.int32)
        _finish_reason(meta, request)
        sets: Sets = []
        logprobs = read_logprobs(meta["output_token_logprobs"] or [], tokens, request)
        if request.sampling.records_kept:
            sets, logprobs = read_kept(meta, tokens, logprobs, request)
        return ended(meta, tokens, logprobs, request, routing, sets)


def ended(
    meta: Mapping[str, Any], tokens: np.ndarray, logprobs: np.ndarray, request: GenerationRequest,
    routing: Routing | None, sets: Sets,
) -> Generation:  # fmt: skip
    """Return a generation of which the server has said, last, how it ended. Raises as `read_answer` does."""
    reason = _finish_reason(meta, request)
    read, asked = meta.get("prompt_tokens"), len(request.token_ids)
    if request.images and reason != "abort" and read != asked:
        raise RequestRefusedError(
            f"{_name(request)}: SGLang reads {read} tokens, and with its images they are "
            f"{asked}: its model directory needs the run's preprocessor_config.json, and "
            "mm_process_config must not be set"
        )
    if reason != "abort" and read not in (None, asked):
        raise RequestRefusedError(
            f"{_name(request)}: SGLang read {read} of its {asked} tokens: the server must be started without "
            "--allow-auto-truncate, which cuts a prompt that is too long for it"
        )
    if reason == "length" and len(tokens) and int(tokens[-1]) in request.sampling.stop_token_ids:
        reason = "stop"  # SGLang looks at the limit first: an answer that ends with its last token is whole
    return Generation(
        token_ids=tokens,
        logprobs=logprobs,
        policy_versions=_versions(meta, len(tokens), request),
        finish_reason=reason,
        routed_experts=_routed(meta, len(tokens), request, routing),
        kept=kept_sets(sets, request),
    )


def work_of(meta: Mapping[str, Any]) -> WorkCounts:
    """Return what a server says of the work on one answer; servers without drafts name no passes."""
    passes = int(meta.get("spec_verify_ct") or 0)
    return WorkCounts(
        prompt_tokens=int(meta.get("prompt_tokens") or 0),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        drafted_tokens=int(meta.get("completion_tokens") or 0) if passes else 0,
        draft_passes=passes,
    )


def _finish_reason(meta: Mapping[str, Any], request: GenerationRequest) -> FinishReason:
    finish = dict(meta["finish_reason"])
    if finish.get("status_code") == BAD_REQUEST:
        raise RequestRefusedError(f"{_name(request)}: {finish.get('message', finish)}")
    if finish.get("type") not in REASONS or finish.get("status_code"):
        raise EngineError(f"{_name(request)}: SGLang gave it up: {finish.get('message', finish)}")
    return REASONS[finish["type"]]


def read_logprobs(
    pairs: Sequence[Sequence[Any]], tokens: np.ndarray, request: GenerationRequest
) -> np.ndarray:
    """float32 [N], of `[log-prob, token, ...]` for each token. Raises `EngineError` for any others."""
    if len(pairs) != len(tokens):
        raise EngineError(f"{_name(request)}: {len(tokens)} tokens came with {len(pairs)} log-probs")
    logprobs = np.array([pair[0] for pair in pairs], np.float32)  # JSON has null for NaN: NaN here again
    # NaN is both the least and the largest; to look at these two takes a third of the time
    if len(logprobs) and not (
        logprobs[logprobs.argmin()] > -np.inf and logprobs[logprobs.argmax()] <= LARGEST_LOGPROB
    ):
        wrong = np.flatnonzero(~(np.isfinite(logprobs) & (logprobs <= LARGEST_LOGPROB)))
        raise EngineError(
            f"{_name(request)}: the log-prob of token {wrong[0]} of {len(tokens)} is {logprobs[wrong[0]]}: "
            "are the weights finite, and is the server's precision wide enough?"
        )
    told = [pair[1] for pair in pairs]
    if told != tokens.tolist():
        at = next(n for n, token in enumerate(told) if token != tokens[n])
        raise EngineError(
            f"{_name(request)}: the log-probs are of other tokens than those returned: token {at} of "
            f"{len(tokens)} is {tokens[at]}, and the log-prob is of {told[at]}"
        )
    return logprobs


def read_prompt_logprobs(answer: Mapping[str, Any], request: GenerationRequest) -> list[float]:
    """Return the log-probs of the prompt's tokens but the first and those that stand for images. Raises
    `EngineError` for another answer."""
    pairs = answer["meta_info"]["input_token_logprobs"][1:]
    asked = np.array(request.token_ids[1:])
    if request.images and len(pairs) == len(asked):
        text = ~shown_tokens(len(request.token_ids), request.images)[1:]
        asked, pairs = asked[text], [pair for pair, kept in zip(pairs, text, strict=True) if kept]
    highest = max(request.token_ids)
    for pair, token in zip(pairs, asked.tolist(), strict=False):  # `read_logprobs` counts them
        if pair[1] == 0 and token == highest:  # SGLang writes 0 for the last id of its vocabulary
            pair[1] = token
    return cast(list[float], read_logprobs(pairs, asked, request).tolist())


def _versions(meta: Mapping[str, Any], length: int, request: GenerationRequest) -> np.ndarray:
    """Return the version of each token: exact spans where the server reports them, else its one version.
    Raises `OtherWeightsError` for weights of another process."""
    whole: list[dict[str, Any]] = [{"version": meta.get("weight_version"), "start": 0, "end": length}]
    versions, ended = np.full(length, -1, np.int32), 0
    for span in meta.get("weight_versions") or whole:
        start, end = span["start"], span["end"]
        if start != ended or end < start:
            raise EngineError(f"{_name(request)}: its spans of versions do not follow one another: {meta}")
        versions[start:end], ended = version_of(span["version"]), end
    if (versions < 0).any():
        raise EngineError(f"{_name(request)}: some of its tokens are of no version: {meta}")
    return versions


def _routed(
    meta: Mapping[str, Any], length: int, request: GenerationRequest, routing: Routing | None
) -> np.ndarray | None:
    """Return the experts of the tokens from `experts_from` on; a request that waits when it is aborted has
    none."""
    if routing is None or request.experts_from is None:
        return None
    text = meta.get("routed_experts")
    if text is None:
        if meta["finish_reason"]["type"] == "abort":
            return None
        raise EngineError(
            f"{_name(request)}: its routed experts did not come: start the server with "
            "--enable-return-routed-experts"
        )
    try:
        return routing.read(text, max(0, len(request.token_ids) + length - 1 - request.experts_from))
    except EngineError as error:
        raise EngineError(f"{_name(request)}: {error}") from error


def _name(request: GenerationRequest) -> str:
    return f"request {request.request_id}"


class Streamed:
    """The tokens of one request so far. SGLang says only at the end which of them are of which weights. Those
    that came before the first update in mid-generation are of the version that it began with; later ones
    count when the whole answer is there."""

    def __init__(self, request: GenerationRequest, policy_version: int) -> None:
        self._request = request
        self._policy_version = policy_version
        self._token_ids = array("i")
        self._logprobs = array("f")
        self._sets: Sets = []
        """Kept sets of the tokens, where the request wants them."""
        self._meta: dict[str, Any] = {}
        self._of_one_version: int | None = None
        """Tokens that were there when the weights began to change."""

    @property
    def complete(self) -> bool:
        return bool(self._meta.get("finish_reason"))

    @property
    def begun(self) -> bool:
        """Return whether the server has handed out a token, which it does with the first one at once."""
        return bool(self._token_ids)

    @property
    def meta(self) -> Mapping[str, Any]:
        return self._meta

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Take the next piece, which may repeat tokens that came before. Raises EngineError for others."""
        with reading(self._request):
            self._add(chunk)

    def _add(self, chunk: Mapping[str, Any]) -> None:
        tokens, meta = array("i", chunk["output_ids"]), dict(chunk["meta_info"])
        total, pairs = int(meta["completion_tokens"]), list(meta.pop("output_token_logprobs") or [])
        if (label := meta.get("weight_version")) is not None:
            version_of(label)
        begin = total - len(tokens)
        known = self._token_ids[max(0, begin) :]
        if not 0 <= begin <= len(self._token_ids) or known != tokens[: len(known)]:
            raise EngineError(
                f"tokens {begin} to {total} came, which do not follow the {len(self._token_ids)} before"
            )
        pairs = pairs[max(0, len(pairs) - len(tokens)) :]
        ids = np.array(tokens, np.int32)
        logprobs = read_logprobs(pairs, ids, self._request)
        if self._request.sampling.records_kept:
            self._sets[begin:], logprobs = read_kept(meta, ids, logprobs, self._request)
        self._token_ids[begin:] = tokens
        self._logprobs[begin:] = array("f", logprobs.tobytes())
        for name in (SETS, LOGPROBS):
            meta.pop(name, None)
        self._meta = meta

    def generation(self, routing: Routing | None = None) -> Generation:
        """Return the whole answer, as `read_answer` makes it of an answer that comes at once. Raises as that
        does."""
        tokens, logprobs = np.array(self._token_ids, np.int32), np.array(self._logprobs, np.float32)
        with reading(self._request):
            return ended(self._meta, tokens, logprobs, self._request, routing, self._sets)

    def weights_change(self) -> None:
        """Call this before weights change: of tokens that come from now on nobody knows the version yet."""
        if self._of_one_version is None:
            self._of_one_version = len(self._token_ids)

    def kept(self) -> Generation:
        """Return the tokens whose version is certain."""
        tokens = np.array(self._token_ids[: self._of_one_version], np.int32)
        logprobs = np.array(self._logprobs[: len(tokens)], np.float32)
        versions = np.full(len(tokens), self._policy_version, np.int32)
        sets = kept_sets(self._sets[: len(tokens)], self._request)
        return Generation(tokens, logprobs, versions, "abort", kept=sets)


async def read_events(content: AsyncIterable[bytes]) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the JSON objects of a stream of server-sent events, until it says that it is over or breaks off.
    Raises EngineError for anything else."""
    held, searched = bytearray(), 0
    async for data in content:
        held += data
        while (end := held.find(_EVENT_END, searched)) >= 0:
            event = bytes(held[:end]).strip().removeprefix(_DATA)
            del held[: end + len(_EVENT_END)]
            searched = 0
            if event == _LAST:
                return
            try:
                said = json.loads(event)
            except NOT_JSON:
                said = None
            if not isinstance(said, dict):
                raise EngineError(f"a stream has {event[:100]!r} where a JSON object is expected")
            yield said
        searched = max(0, len(held) - 1)
