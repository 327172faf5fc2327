"""A server that a reward asks over HTTP: pooled connections, limits of time, repeated requests, a budget."""

import asyncio
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
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
BODY_LOST = frozenset({301, 302, 303})
"""Redirections after which a request has lost its body: what answers knows nothing of the question."""
BROKEN_OFF = ("abort", "error")
"""What servers call the end of an answer that they gave up."""
ANSWERS = frozenset({"choices", "reward"})
"""Fields of replies that are answers, whatever stands beside."""
FAILED_BEHIND = 502
"""Status of an error without one."""


class RefusedError(UnscoredError):
    """The server answered that it does not take the request, by a status that a later request gets too."""


class TransientError(UnscoredError):
    """A request failed in a way that a later one may not."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        """Take what happened, and the seconds after which the server wants to be asked again, if it said."""
        super().__init__(message)
        self.wait_s = wait_s


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
            on=self._repeats,
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

    def _repeats(self, error: Exception) -> bool | float:
        """Return whether a failed request is repeated, or after how many seconds."""
        if not isinstance(error, TransientError):
            return False
        return True if error.wait_s is None else min(error.wait_s, self._config.wait_max_s)

    async def _post_once(self, body: JSON) -> EndpointReply:
        try:
            async with self._places:
                self._spend_call()
                async with self._connected().post(self._url, json=body, headers=self._headers) as response:
                    return self._understood(response, await _read(response, self._what))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._transient(f"{error!r} from {self._url}") from error

    def _understood(self, response: aiohttp.ClientResponse, raw: bytes) -> EndpointReply:
        if not BODY_LOST.isdisjoint(earlier.status for earlier in response.history):
            raise RefusedError(f"{self._what}: {self._url} leads to {response.url}: give that address")
        try:
            body, problem = cast(JSON, json.loads(raw)) if raw.strip() else None, None
        except (ValueError, RecursionError) as error:
            body, problem = None, error
        status = _status(response.status, body)
        if status in REPEATED or status >= 500:
            reason = f"status {status} from {self._url}: {_shown(raw)}"
            raise self._transient(reason, _wait_s(response.headers.get("Retry-After")))
        if not 200 <= status < 300:
            raise RefusedError(f"{self._what}: {self._url} refused the request, {status}: {_shown(raw)}")
        if problem is not None:
            raise InvalidRewardError(
                f"{self._what}: {self._url} answered no JSON: {_shown(raw)}"
            ) from problem
        return EndpointReply(status, body)

    def _transient(self, reason: str, wait_s: float | None = None) -> TransientError:
        """Return the error of a failed request, which the log shows at most once a period."""
        if times := self._failures.due(time.monotonic()):
            log.warning("reward_request_failed", times=times, reward=self._what, reason=reason)
        return TransientError(f"{self._what}: {reason}", wait_s)

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


def _status(status: int, body: JSON) -> int:
    """Return the status of a reply, or that of an error in its body: routers pass on with a status of 200
    what a server behind them failed with."""
    error = body.get("error") if isinstance(body, Mapping) and not body.keys() & ANSWERS else None
    if not 200 <= status < 300 or not isinstance(error, Mapping | str) or not error:
        return status
    code = error.get("code") if isinstance(error, Mapping) else None
    return code if isinstance(code, int) and code >= 400 else FAILED_BEHIND


def _wait_s(said: str | None) -> float | None:
    """Return the seconds of `Retry-After`, which are a number or a date; None for anything else."""
    try:
        return max(0.0, float(said or ""))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(said or "").timestamp() - time.time())
    except ValueError:
        return None


def _shown(raw: bytes) -> str:
    return repr(raw[:SHOWN].decode(errors="replace"))
