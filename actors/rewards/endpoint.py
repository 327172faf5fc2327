"""A server that a reward asks over HTTP: pooled connections, limits of time, repeated requests, a budget."""

import asyncio
import json
import os
import time
from dataclasses import dataclass
from typing import cast

import aiohttp
import stamina
import structlog

from actors.episodes.task import JSON
from actors.rewards.base import BudgetSpentError, InvalidRewardError, UnscoredError
from actors.settings.rewards import EndpointConfig
from bus.errors import ConfigError
from bus.process.log_throttle import LogThrottle
from bus.process.plugins import refuse_of_record

log = structlog.get_logger()
MOST_BYTES = 4 << 20
"""Longest body of a reply that is read."""
FIRST_WAIT_S = 1.0
LOG_PERIOD_S = 10.0
SHOWN = 200
"""Characters of a reply that an error shows."""
REPEATED = frozenset({408, 429})
"""Statuses below 500 that a later request may not get."""


class RefusedError(UnscoredError):
    """The server answered that it does not take the request, by a status that a later request gets too."""


class TransientError(UnscoredError):
    """A request failed in a way that a later one may not."""


@dataclass(frozen=True, slots=True)
class EndpointReply:
    """A reply of the server that was not refused."""

    status: int
    body: JSON
    """JSON of the reply; None where the body was empty."""


class Endpoint:
    """Posts JSON to one URL. Connections open with the first request, on the event loop that asks."""

    def __init__(self, config: EndpointConfig, *, what: str, path: str = "") -> None:
        """Take the settings of `what`, whose server is at `config.url` + `path`. Raises ConfigError without
        an address, and where a key is to come from a variable that is not set."""
        if not config.url:
            raise ConfigError(f"{what} needs the address of its server: set its url in the run's settings")
        self._config = config
        self._what = what
        self._url = config.url.rstrip("/") + path
        self._headers = _headers(config, what)
        self._session: aiohttp.ClientSession | None = None
        self._places = asyncio.Semaphore(config.concurrency)
        self._failures = LogThrottle(LOG_PERIOD_S)
        stamina.instrumentation.set_on_retry_hooks(())  # stamina would log each repeated request
        self.calls = 0
        """Requests that were sent."""
        self.spent = ""
        """Says which other budget than that of calls is spent; empty while none is."""

    async def post(self, body: JSON) -> EndpointReply:
        """Return the reply, asking again while the server is away. Raises `UnscoredError` when all attempts
        failed or the server refused the request, `BudgetSpentError` when no further request is allowed."""
        retries = stamina.retry_context(
            on=TransientError,
            attempts=self._config.attempts,
            timeout=None,
            wait_initial=FIRST_WAIT_S,
            wait_max=self._config.wait_max_s,
            wait_jitter=FIRST_WAIT_S,
        )
        async for attempt in retries:
            with attempt:
                return await self._post_once(body)
        raise AssertionError("retry_context raises the last error")

    async def _post_once(self, body: JSON) -> EndpointReply:
        try:
            async with self._places:
                self._spend_call()
                async with self._connected().post(self._url, json=body, headers=self._headers) as response:
                    return self._understood(response.status, await _read(response, self._what))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._transient(f"{error!r} from {self._url}") from error

    def _understood(self, status: int, raw: bytes) -> EndpointReply:
        if status in REPEATED or status >= 500:
            raise self._transient(f"status {status} from {self._url}: {_shown(raw)}")
        if not 200 <= status < 300:
            raise RefusedError(f"{self._what}: {self._url} refused the request, {status}: {_shown(raw)}")
        try:
            return EndpointReply(status, cast(JSON, json.loads(raw)) if raw.strip() else None)
        except (ValueError, RecursionError) as error:
            raise InvalidRewardError(f"{self._what}: {self._url} answered no JSON: {_shown(raw)}") from error

    def _transient(self, reason: str) -> TransientError:
        """Return the error of a failed request, which the log shows at most once a period."""
        if times := self._failures.due(time.monotonic()):
            log.warning("reward_request_failed", times=times, reward=self._what, reason=reason)
        return TransientError(f"{self._what}: {reason}")

    def _spend_call(self) -> None:
        most = self._config.max_calls
        if most is not None and self.calls >= most:
            self.spent = f"max_calls={most}"
        if self.spent:
            raise BudgetSpentError(
                f"{self._what}: the budget {self.spent} of this actor is spent: raise it, or leave it out"
            )
        self.calls += 1

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0
                ),  # `_places` has the limit: waiting costs no `timeout_s`
                timeout=aiohttp.ClientTimeout(total=self._config.timeout_s),
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()


def _headers(config: EndpointConfig, what: str) -> dict[str, str]:
    if config.key_variable is None:
        return {}
    variable = config.key_variable
    refuse_of_record(f"{what}: the environment variable {variable!r}", variable)  # the value may be a secret
    key = os.environ.get(config.key_variable)
    if not key:
        raise ConfigError(
            f"{what}: the environment variable {config.key_variable} holds no key: set it where actors start"
        )
    return {"Authorization": f"Bearer {key}"}


async def _read(response: aiohttp.ClientResponse, what: str) -> bytes:
    """Return the body. Raises UnscoredError for one that is too long to be a reward."""
    raw = await response.content.read(MOST_BYTES)
    while len(raw) < MOST_BYTES and (more := await response.content.read(MOST_BYTES - len(raw))):
        raw += more
    if len(raw) >= MOST_BYTES:
        raise UnscoredError(f"{what}: the reply has {MOST_BYTES} bytes or more")
    return raw


def _shown(raw: bytes) -> str:
    return repr(raw[:SHOWN].decode(errors="replace"))
