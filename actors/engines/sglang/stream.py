"""What a server has handed out of a generation while it goes on: it stays when the server dies."""

import json
from array import array
from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from typing import Any

import numpy as np

from actors.engines.base import Generation, GenerationRequest
from actors.engines.sglang.answers import ended, read_logprobs
from actors.engines.sglang.expert_routing import Routing
from bus.errors import EngineError

_EVENT_END = b"\n\n"
_DATA = b"data: "
_LAST = b"[DONE]"


class Streamed:
    """The tokens of one request so far.

    SGLang says only at the end which of them are of which weights. Those that came before the first update in
    mid-generation are of the version that it began with; later ones count when the whole answer is there."""

    def __init__(self, request: GenerationRequest, policy_version: int) -> None:
        self._request = request
        self._policy_version = policy_version
        self._token_ids = array("i")
        self._logprobs = array("f")
        self._meta: dict[str, Any] = {}
        self._of_one_version: int | None = None
        """Tokens that were there when the weights began to change."""

    @property
    def complete(self) -> bool:
        """Whether the server has said how it ended."""
        return bool(self._meta.get("finish_reason"))

    @property
    def meta(self) -> Mapping[str, Any]:
        """What the server said last of the request."""
        return self._meta

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Take the next piece, which may repeat tokens that came before. Raises EngineError for others."""
        try:
            tokens, meta = array("i", chunk["output_ids"]), dict(chunk["meta_info"])
            total, pairs = int(meta["completion_tokens"]), list(meta.pop("output_token_logprobs") or [])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise EngineError(f"a piece of a stream is not one of SGLang's: {error!r}") from error
        begin = total - len(tokens)
        known = self._token_ids[max(0, begin) :]
        if not 0 <= begin <= len(self._token_ids) or known != tokens[: len(known)]:
            raise EngineError(
                f"tokens {begin} to {total} came, which do not follow the {len(self._token_ids)} before"
            )
        pairs = pairs[max(0, len(pairs) - len(tokens)) :]
        logprobs = read_logprobs(pairs, np.array(tokens, np.int32), self._request)
        self._token_ids[begin:] = tokens
        self._logprobs[begin:] = array("f", logprobs.tobytes())
        self._meta = meta

    def generation(self, routing: Routing | None = None) -> Generation:
        """All of it, as `read_answer` makes it of an answer that comes at once. Raises as that does."""
        tokens, logprobs = np.array(self._token_ids, np.int32), np.array(self._logprobs, np.float32)
        return ended(self._meta, tokens, logprobs, self._request, routing)

    def weights_change(self) -> None:
        """Call it before they do: of tokens that come from now on nobody knows the version yet."""
        if self._of_one_version is None:
            self._of_one_version = len(self._token_ids)

    def kept(self) -> Generation:
        """The tokens whose version is certain."""
        tokens = np.array(self._token_ids[: self._of_one_version], np.int32)
        logprobs = np.array(self._logprobs[: len(tokens)], np.float32)
        return Generation(tokens, logprobs, np.full(len(tokens), self._policy_version, np.int32), "abort")


async def read_events(content: AsyncIterable[bytes]) -> AsyncGenerator[dict[str, Any], None]:
    """The JSON objects of a stream of server-sent events, until it says that it is over or breaks off.

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
                yield json.loads(event)
            except ValueError as error:
                raise EngineError(f"a stream has {event[:100]!r} where JSON is expected") from error
        searched = max(0, len(held) - 1)
