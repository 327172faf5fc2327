"""Asks an SGLang server over HTTP for what it thinks of tokens that others sampled."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Self, TypeVar

import aiohttp
import stamina
import structlog
from pydantic import BaseModel, JsonValue, ValidationError

from bus.errors import ConfigError, EngineError, RequestRefusedError
from learner.config.frozen_policies import TeacherConfig, teacher_settings
from learner.logprobs.teacher_answers import AbortedError, Entries, Tops, read_entries

log = structlog.get_logger()
T = TypeVar("T")
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 15.0
LOG_PERIOD_S = 10.0
SHOWN = 500
"""Characters of a reply that an error shows."""
OK = 200
REPEATED = frozenset({408, 429})
"""Statuses below 500 that a later request may not get."""


class _AwayError(EngineError):
    """A request failed in a way that a later one may not."""


class _Model(BaseModel):
    model_path: str = ""
    is_generation: bool = True


class _Server(BaseModel):
    skip_tokenizer_init: bool = False
    max_req_input_len: int | None = None
    """A request has fewer tokens than this."""


class ServerModel(BaseModel):
    """What a server says of its model."""

    name: str
    """Path or name under which the model was loaded."""
    generates: bool
    """The server gives log-probs of tokens; a reward or embedding model does not."""
    knows_texts: bool
    """The server has a tokenizer."""
    longest: int | None
    """Most tokens that a request may have; None where the server does not say."""


class TeacherServer:
    """One server of a teacher; a context manager whose connections are open inside."""

    def __init__(self, tag: str, config: TeacherConfig) -> None:
        """Take the settings of the teacher `tag`, which has a `url`."""
        self.url = (config.url or "").rstrip("/")
        self._tag = tag
        self._config = config
        self._places = asyncio.Semaphore(config.concurrency)
        self._session: aiohttp.ClientSession | None = None
        self._logged_s = float("-inf")
        stamina.instrumentation.set_on_retry_hooks(())  # stamina would log each repeated request

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # `_places` has the limit: waiting costs no `timeout_s`
            timeout=aiohttp.ClientTimeout(total=self._config.timeout_s),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def model(self) -> ServerModel:
        """Return what the server says of its model. Raises as `scored` does."""
        model = await self._answer("/model_info", None, _Model.model_validate_json)
        server = await self._answer("/server_info", None, _Server.model_validate_json)
        return ServerModel(
            name=model.model_path,
            generates=model.is_generation,
            knows_texts=not server.skip_tokenizer_init,
            longest=None if server.max_req_input_len is None else server.max_req_input_len - 1,
        )

    async def scored(
        self, token_ids: Sequence[int], read: Callable[[Entries, Tops], T], *,
        begin: int, top_k: int = 0, with_texts: bool = False,
    ) -> T:  # fmt: skip
        """Return what `read` makes of the entries of the tokens from `begin` on, and of the `top_k` likeliest
        ones in their places.

        The first entry of each is none. Prefixes up to `begin` may come from the server's cache. `read` is
        called in a thread, since an answer may have megabytes.

        Raises `RequestRefusedError` when the server will never answer this, and `EngineError` when it was
        away for `outage_s`, when its answer is not one to these tokens, and when `read` does. The message
        names its address."""
        body: JsonValue = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": begin,
            "top_logprobs_num": top_k,
            "return_text_in_logprobs": with_texts,
        }

        def of_raw(raw: bytes) -> T:
            return read(*read_entries(raw, token_ids[begin:], with_tops=top_k > 0))

        return await self._answer("/generate", body, of_raw)

    async def _answer(self, path: str, body: JsonValue, read: Callable[[bytes], T]) -> T:
        retries = stamina.retry_context(
            on=_AwayError,
            attempts=None,
            timeout=self._config.outage_s,
            wait_initial=FIRST_WAIT_S,
            wait_max=LONGEST_WAIT_S,
            wait_jitter=FIRST_WAIT_S,
        )
        async with self._places:  # held between attempts as well: nobody else is served meanwhile
            try:
                async for attempt in retries:
                    with attempt:
                        return await self._answer_once(path, body, read)
            except _AwayError as error:
                settings = teacher_settings(self._tag)
                raise EngineError(
                    f"{error}. It was waited for as long as {settings}.outage_s={self._config.outage_s:g} "
                    f"says: start it again, correct {settings}.url, or raise outage_s"
                ) from error
        raise AssertionError("retry_context raises the last error")

    async def _answer_once(self, path: str, body: JsonValue, read: Callable[[bytes], T]) -> T:
        raw = await self._received(path, body)
        try:
            return await asyncio.to_thread(read, raw)
        except AbortedError as error:
            raise self._away(path, str(error)) from error
        except ValidationError as error:
            raise EngineError(f"{self._what(path)}: this is no SGLang server: {error}") from error
        except EngineError as error:
            raise type(error)(f"{self._what(path)}: {error}") from error

    async def _received(self, path: str, body: JsonValue) -> bytes:
        try:
            status, raw = await self._reply(path, body)
        except aiohttp.InvalidURL as error:
            settings = teacher_settings(self._tag)
            raise ConfigError(
                f"{settings}.url={self.url!r} is no address, such as http://host:30000"
            ) from error
        except TimeoutError as error:
            raise self._away(path, f"no answer within timeout_s={self._config.timeout_s:g}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._away(path, repr(error)) from error
        if status in REPEATED or status >= 500:
            raise self._away(path, f"status {status}: {_shown(raw)}")
        if status != OK:
            raise RequestRefusedError(
                f"{self._what(path)} refused the request with status {status}: {_shown(raw)}: is it an "
                "SGLang server from 0.5.17 on, with room for the longest trajectory and the policy's "
                "vocabulary?"
            )
        return raw

    async def _reply(self, path: str, body: JsonValue) -> tuple[int, bytes]:
        if self._session is None:
            raise RuntimeError("the server is asked inside `async with` only")
        method = "GET" if body is None else "POST"
        async with self._session.request(method, self.url + path, json=body) as response:
            return response.status, await response.read()

    def _away(self, path: str, reason: str) -> _AwayError:
        now_s = time.monotonic()
        if now_s - self._logged_s >= LOG_PERIOD_S:
            self._logged_s = now_s
            log.warning("teacher_is_away", teacher=self._tag, url=self.url + path, reason=reason)
        return _AwayError(f"{self._what(path)}: {reason}")

    def _what(self, path: str) -> str:
        return f"the {self._tag} at {self.url}{path}"


async def all_of(questions: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """Return all answers in order; the first failure ends the other questions and is raised itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(question) for question in questions]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]


def _shown(raw: bytes) -> str:
    return repr(raw[:SHOWN].decode(errors="replace"))
