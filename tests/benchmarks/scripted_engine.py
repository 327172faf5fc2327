"""A deterministic engine for tests: answers by a function, can be held, failed, swapped and aborted."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from actors.engines.base import Generation, GenerationRequest, Sampling
from actors.policy.policy import Policy
from bus.errors import EngineError
from bus.trajectory import FinishReason
from bus.waiting import unless

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

Script = Callable[[Sequence[int]], Sequence[int]]


class ScriptedEngine:
    """Continues a prompt with `script(prompt_token_ids)`, cut to `max_new_tokens`.

    The first half of the tokens is drawn when a request arrives, the rest when the engine is not held:
    what happens in between (`load_weights`, `abort`, `fail`) happens mid-generation."""

    def __init__(self, script: Script, *, policy_version: int = 0) -> None:
        self._script = script
        self._policy_version = policy_version
        self._open = asyncio.Event()
        self._open.set()
        self._aborts: dict[str, asyncio.Event] = {}
        self._failure: EngineError | None = None
        self.tokens_generated = 0
        self.requests: list[GenerationRequest] = []

    @property
    def policy_version(self) -> int:
        """Return the version of the pretended weights."""
        return self._policy_version

    @property
    def running(self) -> int:
        """Return the number of requests that are held."""
        return len(self._aborts)

    @property
    def waiting(self) -> int:
        """Return 0: every request starts at once."""
        return 0

    def hold(self) -> None:
        """Stop every generation half-way, until `release`."""
        self._open.clear()

    def release(self) -> None:
        """Let held generations end."""
        self._open.set()

    def fail(self, reason: str) -> None:
        """Make every generation, held ones too, raise EngineError from now on."""
        self._failure = EngineError(reason)
        self._open.set()

    async def start(self) -> None:
        """Do nothing."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Continue `request` by the script."""
        self.requests.append(request)
        aborted = self._aborts[request.request_id] = asyncio.Event()
        before = self._policy_version
        try:
            await unless(aborted, self._open.wait())
        finally:
            del self._aborts[request.request_id]
        if self._failure is not None:
            raise self._failure
        return self._generation(request, before, aborted=aborted.is_set())

    async def load_weights(self, state: Mapping[str, "torch.Tensor"], policy_version: int) -> float:
        """Take the version; the tensors are ignored."""
        self._policy_version = policy_version
        return 0.0

    async def abort(self, request_id: str) -> None:
        """End a held request with its first half."""
        if request_id in self._aborts:
            self._aborts[request_id].set()

    async def close(self) -> None:
        """Fail what is held."""
        self.fail("the scripted engine was closed")

    def _generation(self, request: GenerationRequest, version_before: int, *, aborted: bool) -> Generation:
        script = list(self._script(request.token_ids))
        tokens = np.array(script[: request.sampling.max_new_tokens], np.int32)
        versions = np.full(len(tokens), self._policy_version, np.int32)
        half = len(tokens) // 2
        versions[:half] = version_before
        logprobs = -0.1 - 0.01 * np.arange(len(tokens), dtype=np.float32)
        end = half if aborted else len(tokens)
        reason: FinishReason = "length" if len(script) > len(tokens) else "stop"
        self.tokens_generated += end
        return Generation(tokens[:end], logprobs[:end], versions[:end], "abort" if aborted else reason)


def policy_saying(tokenizer: "PreTrainedTokenizerFast", text: str, *, max_new_tokens: int = 64) -> Policy:
    return Policy(
        ScriptedEngine(lambda _: tokenizer.encode(text)), tokenizer, Sampling(max_new_tokens=max_new_tokens)
    )
