"""A further policy at the server of another engine, behind the Engine protocol."""

from collections.abc import Mapping, Sequence

import structlog
import torch

from actors.engines.base import Generation, GenerationRequest, KvTokens, WorkCounts
from actors.engines.served_adapters import ServedAdapters
from actors.engines.sglang.engine import SglangEngine
from actors.engines.sglang.served_policy import ServedPolicy
from bus.errors import EngineError
from bus.images import PlacedImage

log = structlog.get_logger()


class GuestEngine:
    """Serves one policy through a server that another engine keeps alive for its own. The server has the
    frozen weights once, and the adapters of both. When its engine fails or is closed, requests raise
    EngineError here too: the fleet builds another guest, at the next engine."""

    def __init__(self, host: SglangEngine, name: str, served: ServedAdapters) -> None:
        self._host = host
        self._name = name
        self._served = served
        self._policy: ServedPolicy | None = None
        self._tokens_before = 0
        """Tokens of guests before, at the same server."""
        self._closed = False

    @property
    def policy_version(self) -> int:
        return -1 if self._policy is None else self._policy.version

    @property
    def running(self) -> int:
        return 0 if self._policy is None else self._host.in_progress.running(self._policy)

    @property
    def waiting(self) -> int:
        return 0 if self._policy is None else self._host.in_progress.waiting(self._policy)

    @property
    def requests_of_others(self) -> int:
        """Return the number of requests for other policies at the server, or when it failed."""
        return 0 if self._policy is None else self._host.in_progress.of_others(self._policy)

    @property
    def tokens_generated(self) -> int:
        return 0 if self._policy is None else self._policy.tokens_generated - self._tokens_before

    @property
    def longest_context(self) -> int | None:
        """Return the most tokens of a prompt and its answer together, as its host knows them."""
        return self._host.longest_context

    @property
    def work_counts(self) -> WorkCounts:
        return self._host.work_counts

    @property
    def kv_tokens(self) -> KvTokens | None:
        """Return how full the server's cache is, with the requests of all policies."""
        return self._host.kv_tokens

    async def start(self) -> None:
        """Begin to serve, from the first version on. Raises ConfigError for adapters that the server cannot
        have, EngineError when it has failed."""
        policies = self._host.policies
        self._policy = policies.named(self._name) or policies.add(
            self._name, await self._host.checked_adapters(self._served, policy=self._name)
        )
        self._tokens_before = self._policy.tokens_generated
        log.info("policy_served_too", policy=self._name, url=self._host.url)

    async def generate(self, request: GenerationRequest) -> Generation:
        return await self._host.generate(request, self._here())

    async def load_weights(self, state: Mapping[str, torch.Tensor], policy_version: int) -> float:
        """Load a version as an adapter of its own; the frozen weights beside it where the server lacks them.
        Returns and raises as the engine at that server does."""
        return await self._host.load_weights(state, policy_version, self._here())

    async def score(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Sequence[PlacedImage]] = ()
    ) -> list[list[float]]:
        """Return what the engine at that server says of these tokens, with this policy. Raises
        EngineError."""
        return await self._host.score(sequences, images, self._here())

    async def abort(self, request_id: str) -> None:
        """End one request now: its `generate` returns the tokens so far. Unknown ids are ignored."""
        await self._host.abort(request_id)

    async def check_health(self) -> None:
        """Raise EngineError when the server has failed, or its engine is closed."""
        await self._host.check_health()

    async def close(self) -> None:
        """End the policy's requests, which raise EngineError; the server goes on."""
        if self._policy is not None:
            self._policy.leave()
            self._host.in_progress.fail("the policy is served no more", policy=self._policy)
        self._closed = True

    def _here(self) -> ServedPolicy:
        if self._policy is None or self._closed:
            raise EngineError(f"the engine of policy {self._name!r} was not started, or is closed")
        return self._policy
