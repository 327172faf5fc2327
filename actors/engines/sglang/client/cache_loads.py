"""How full an SGLang server's cache is, asked now and then."""

import asyncio
from itertools import count

import structlog

from actors.engines.base import KvTokens
from actors.engines.sglang.client.client import Json, SglangClient
from bus.errors import EngineError

log = structlog.get_logger()
PERIOD_S = 1.0
TIMEOUT_S = 5.0
STALE_READINGS = 10
"""Questions without an answer after which nothing is known any more."""


class CacheLoads:
    """Keeps the newest reading of a server that tells."""

    def __init__(self) -> None:
        self.tokens: KvTokens | None = None
        """The newest reading; None while there is none."""

    async def watch(self, client: SglangClient) -> None:
        """Ask until cancelled. A server that does not answer is the health checks' concern."""
        failed = 0
        for number in count(1):
            try:
                self.tokens = read_loads(await client.loads(timeout_s=TIMEOUT_S), number)
                failed = 0
            except EngineError as error:
                failed += 1
                if failed == STALE_READINGS:
                    log.warning("cache_load_not_known", url=client.url, reason=str(error))
                    self.tokens = None
            await asyncio.sleep(PERIOD_S)


def read_loads(answer: Json, reading: int) -> KvTokens | None:
    """Return the tokens in use and all there are, over all replicas; None where the server does not say. The
    uncached tokens of waiting prompts count, since they are to be held next."""
    try:
        loads = list(answer["loads"])
        used = sum(int(load["num_used_tokens"]) for load in loads)
        waiting = sum(int(load.get("num_waiting_uncached_tokens") or 0) for load in loads)
        capacity = sum(int(load["max_total_num_tokens"]) for load in loads)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):  # the last for infinity
        return None
    if capacity <= 0 or min(used, waiting) < 0:
        return None
    return KvTokens(used + waiting, capacity, shares_prefixes=True, reading=reading)
