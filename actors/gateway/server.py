"""The gateway over HTTP: finds the session of a request, and speaks the dialect of its path."""

import asyncio
import re
import socket
import ssl
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TypeAlias

import structlog
from aiohttp import web

from actors.episodes.errors import LatestUses
from actors.episodes.task import JSON
from actors.gateway.dialects.anthropic import ANTHROPIC
from actors.gateway.dialects.base import ChatDialect, Dialect
from actors.gateway.dialects.exchange import Ask, Reply
from actors.gateway.dialects.google import GOOGLE, parse_counted
from actors.gateway.dialects.known_chats import KnownChats
from actors.gateway.dialects.openai_chat import OPENAI_CHAT
from actors.gateway.dialects.openai_responses import OPENAI_RESPONSES
from actors.gateway.dialects.refusal import RefusedError
from actors.gateway.posted_reward import posted_reward, turn_reward
from actors.gateway.retries import Attempt
from actors.gateway.session import DIFFERENCES_LOG_PERIOD_S, Session
from actors.gateway.tool_hooks import load_hook
from actors.policy.policy import Policy
from actors.settings.gateway import GatewayConfig
from bus.errors import BusError, ConfigError
from bus.process.log_throttle import LogThrottle
from bus.waiting import cancelled

EVENT_STREAM_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


async def streamed(
    request: web.Request, dialect: Dialect, ask: Ask, answer: Coroutine[object, object, Reply], *,
    keep_alive_s: float,
) -> web.StreamResponse:  # fmt: skip
    """Send the answer. Raises `RefusedError` while nothing was sent; a later one is an event. A client that
    leaves cancels this, and with it the answer."""
    pending = asyncio.create_task(answer, name="gateway stream")
    unmet: dict[str, str] = {}
    try:
        await asyncio.wait([pending], timeout=keep_alive_s)
        if pending.done():
            unmet = _known_before_the_status(dialect, pending)
        response = web.StreamResponse(headers={**EVENT_STREAM_HEADERS, **unmet})
        await response.prepare(request)
        while not pending.done():
            await response.write(dialect.keep_alive)
            await asyncio.wait([pending], timeout=keep_alive_s)
        await response.write(_rest_of_stream(dialect, ask, pending))
        await response.write_eof()
        return response
    finally:
        await cancelled(pending)


def _known_before_the_status(dialect: Dialect, answered: asyncio.Task[Reply]) -> dict[str, str]:
    """Return the headers of an answer. Raises `RefusedError` but for what its clients read in the stream."""
    try:
        return _unmet_headers(answered.result())
    except RefusedError as refusal:
        if refusal.code not in dialect.told_in_streams:
            raise
        return {}


def _unmet_headers(reply: Reply) -> dict[str, str]:
    unmet = ", ".join(dict.fromkeys(chain.from_iterable(each.unmet for each in reply.all)))
    return {UNMET_HEADER: unmet} if unmet else {}


def _rest_of_stream(dialect: Dialect, ask: Ask, answered: asyncio.Task[Reply]) -> bytes:
    """Return the events of an answer, or of a refusal that came after the first bytes."""
    try:
        return b"".join(dialect.events(ask, answered.result()))
    except RefusedError as refusal:
        return dialect.error_event(refusal)


log = structlog.get_logger()
CHATS: Mapping[str, ChatDialect] = {"/v1/chat/completions": OPENAI_CHAT, "/v1/messages": ANTHROPIC}
DIALECTS: Mapping[str, Dialect] = {**CHATS, "/v1/responses": OPENAI_RESPONSES}
GENERATE_PATH = (
    "/{version:v1|v1alpha|v1beta}/models/{model}:{method:generateContent|streamGenerateContent|countTokens}"
)
COUNT_TOKENS = "/v1/messages/count_tokens"
CLOSED_REMEMBERED = 4096
"""Closed sessions whose late requests are told so."""
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
PORT = "{port}"
"""Stands in `advertise` for the port that was free."""
BACKLOG = 1024
"""Connections that the kernel keeps until they are accepted: agents begin in waves."""
UNMET_HEADER = "X-Sluice-Unmet"
"""Names what a request asked for and its answer does not give."""
REPLY_ID = re.compile("[0-9a-f]{24}")
"""What the ids of answers have in common, in all APIs."""
Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
Routes: TypeAlias = Callable[[web.Application], None]
"""Adds further paths."""


class Gateway:
    """Serves sessions, each of which records one rollout."""

    def __init__(self, config: GatewayConfig, further: Routes | None = None) -> None:
        self._config = config
        self._further = further
        self._hook = load_hook(config.tool_hook)
        self._sessions: dict[str, Session] = {}
        self._owned: dict[str, Session] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._differences = LogThrottle(DIFFERENCES_LOG_PERIOD_S)
        self._requests = LatestUses()
        self._runner: web.AppRunner | None = None
        self._url = ""

    @property
    def url(self) -> str:
        """Return where the gateway listens, as http://host:port."""
        return self._url

    @property
    def port(self) -> int:
        if self._runner is None:
            raise BusError("the gateway is closed: this process ends")
        return int(self._runner.addresses[0][1])

    async def start(self) -> None:
        """Begin to serve. Raises `ConfigError` for an address or a certificate that is not available."""
        tls = _tls(self._config)
        # A client that leaves cancels its handler, and with it what the engine does for it.
        runner = web.AppRunner(
            self._application(), access_log=None, handle_signals=False, handler_cancellation=True,
            shutdown_timeout=1.0,
        )  # fmt: skip
        await runner.setup()
        host, port = self._config.host, self._config.port
        try:
            await web.TCPSite(runner, host, port, backlog=BACKLOG, ssl_context=tls).start()
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(
                f"gateway.port={port}: cannot listen at {host}:{port} ({error.strerror}): choose another, "
                "or 0 for any that is free"
            ) from error
        self._runner = runner
        reached = LOOPBACK.get(host, host)  # of all addresses, the one by which this host's programs come
        shown = f"[{reached}]" if ":" in reached else reached
        taken = str(runner.addresses[0][1])
        own = f"{'http' if tls is None else 'https'}://{shown}:{taken}"
        self._url = (self._config.advertise or own).replace(PORT, taken).rstrip("/")
        log.info("gateway_ready", url=self._url)

    @asynccontextmanager
    async def listening(self, at: socket.socket) -> AsyncIterator[None]:
        """Serve at a further socket while inside, such as one in a program's own network, without TLS."""
        if self._runner is None:
            raise BusError("the gateway is closed: this process ends")
        site = web.SockSite(self._runner, at, backlog=BACKLOG)
        await site.start()
        try:
            yield
        finally:
            await site.stop()

    async def close(self) -> None:
        for session in list(self._sessions.values()):
            await self._close(session)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @asynccontextmanager
    async def session(self, policy: Policy, name: str) -> AsyncIterator[Session]:
        """Let an agent use `policy`, which records what it does, while inside; `name` is for the log."""
        if self._runner is None:
            raise BusError("the gateway is closed: this process ends")
        session = Session(
            policy, self._config, name=name, hook=self._hook, differences=self._differences,
            requests=self._requests,
        )  # fmt: skip
        self._sessions[session.key] = self._owned[session.reward_key] = session
        try:
            yield session
        finally:
            await self._close(session)

    def url_of(self, session: Session, base: str | None = None) -> str:
        """Return the base URL of a session; OpenAI's clients want `/v1` behind it. `base` is where the
        gateway is reached, if that is elsewhere than `url`."""
        return f"{base or self._url}/s/{session.key}"

    def reward_url_of(self, session: Session, base: str | None = None) -> str:
        """Return where the session's reward is posted. It holds the reward key: it is for whoever leads the
        episode, and not for its agent."""
        return f"{base or self._url}/rewards/{session.reward_key}"

    async def _close(self, session: Session) -> None:
        self._owned.pop(session.reward_key, None)
        if self._sessions.pop(session.key, None) is not None:
            for key in (session.key, session.reward_key):
                self._closed[key] = None
            while len(self._closed) > 2 * CLOSED_REMEMBERED:
                self._closed.popitem(last=False)
        await session.close()

    def _application(self) -> web.Application:
        app = web.Application(middlewares=[_in_shape], client_max_size=self._config.most_body_bytes)
        app.router.add_get("/health", self._health)
        for prefix in ("", "/s/{session}"):
            app.router.add_post(f"{prefix}/v1/responses", self._respond)
            app.router.add_post(f"{prefix}/v1/conversations", self._converse)
            for path, dialect in CHATS.items():
                app.router.add_post(prefix + path, partial(self._complete, dialect))
            app.router.add_post(prefix + COUNT_TOKENS, self._count_tokens)
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_get(f"{prefix}/v1/models/{{model:.+}}", self._model)
            app.router.add_post(prefix + GENERATE_PATH, self._generate)
            app.router.add_post(f"{prefix}/reward", self._reward)
        app.router.add_post("/rewards/{reward_key}", self._reward)
        app.router.add_post("/rewards/{reward_key}/turns/{answer}", self._reward_turn)
        if self._further is not None:
            self._further(app)
        return app

    async def _complete(self, dialect: ChatDialect, request: web.Request) -> web.StreamResponse:
        session, raw = self.session_of(request), await self.body_of(request)
        ask = dialect.parse(raw, session.chats)
        return await self._answered(request, session, dialect, _attempt_of(request, raw), ask)

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        """Answer a request of OpenAI's responses, which may go on from an answer of its session."""
        session, raw = self.session_of(request), await self.body_of(request)
        attempt = _attempt_of(request, raw)
        asked = session.responses.read(raw, again=session.had(attempt))

        def keep(reply: Reply) -> None:
            session.responses.keep(asked, OPENAI_RESPONSES.body(asked.ask, reply))

        return await self._answered(request, session, OPENAI_RESPONSES, attempt, asked.ask, keep)

    async def _converse(self, request: web.Request) -> web.Response:
        session = self.session_of(request)
        name = session.responses.begin(await self.body_of(request))
        made = {"object": "conversation", "created_at": int(time.time()), "metadata": {}}
        return web.json_response({"id": name, **made})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        """Do what a path of Google's names behind its model."""
        session, raw = self.session_of(request), await self.body_of(request)
        model, method = request.match_info["model"], request.match_info["method"]
        if method == "countTokens":
            return web.json_response({"totalTokens": await session.count_tokens(parse_counted(raw))})
        ask = replace(GOOGLE.parse(raw, session.chats), model=model, stream=method == "streamGenerateContent")
        return await self._answered(request, session, GOOGLE, _attempt_of(request, raw), ask)

    async def _answered(
        self, request: web.Request, session: Session, dialect: Dialect, attempt: Attempt, ask: Ask,
        keep: Callable[[Reply], None] = lambda _: None,
    ) -> web.StreamResponse:  # fmt: skip
        async def answered() -> Reply:
            reply = await session.answer(ask, request.headers, attempt)
            keep(reply)
            return reply

        if ask.stream:
            return await streamed(request, dialect, ask, answered(), keep_alive_s=self._config.keep_alive_s)
        reply = await answered()
        return web.json_response(dialect.body(ask, reply), headers=_unmet_headers(reply))

    async def _count_tokens(self, request: web.Request) -> web.Response:
        session = self.session_of(request)
        ask = ANTHROPIC.parse(await self.body_of(request), KnownChats())
        return web.json_response({"input_tokens": await session.count_tokens(ask)})

    async def _reward(self, request: web.Request) -> web.Response:
        session = self.owned_session_of(request, "pay its episode")
        session.post_reward(posted_reward(await self.body_of(request)), request.remote or "")
        return web.json_response({"accepted": True})

    async def _reward_turn(self, request: web.Request) -> web.Response:
        session = self.owned_session_of(request, "pay its turns")
        found = REPLY_ID.search(request.match_info["answer"])
        session.reward_turn(found[0] if found else "", turn_reward(await self.body_of(request)))
        return web.json_response({"accepted": True})

    async def _models(self, request: web.Request) -> web.Response:
        self.session_of(request)
        name, model = self._config.model, self._described()
        page = {"has_more": False, "first_id": name, "last_id": name}
        return web.json_response({"object": "list", "data": [model], **page})

    async def _model(self, request: web.Request) -> web.Response:
        self.session_of(request)
        return web.json_response({**self._described(), "id": request.match_info["model"]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "sessions": len(self._sessions)})

    def _described(self) -> dict[str, JSON]:
        """Return the model with the fields of OpenAI's and of Anthropic's list."""
        return {
            "id": self._config.model,
            "object": "model",
            "created": 0,
            "owned_by": "sluice",
            "type": "model",
            "display_name": self._config.model,
            "created_at": "1970-01-01T00:00:00Z",
        }

    def session_of(self, request: web.Request) -> Session:
        """Find a request's session by its path, `X-Session-ID` or API key. Raises `RefusedError`."""
        named = request.match_info.get("session")
        keys = [named] if named is not None else keys_of(request)
        for key in keys:
            if key in self._sessions:
                return self._sessions[key]
        if any(key in self._closed for key in keys):
            raise RefusedError(403, "session_closed", "this session is closed: its episode has ended")
        if named is not None:
            raise RefusedError(
                404, "unknown_session", "the URL names no session: use the base URL that you were given"
            )
        raise RefusedError(
            401, "unknown_session", "the API key names no session: use the one that you were given"
        )

    def owned_session_of(self, request: web.Request, what: str) -> Session:
        """Find the session of a request by its reward key, in its path or where API keys stand. Raises
        `RefusedError`, also for who has the session's own key, and says that it does not do `what`."""
        named = request.match_info.get("reward_key")
        for key in [named] if named is not None else keys_of(request):
            if key in self._owned:
                return self._owned[key]
        if named is None:
            raise self.session_of(request).refuse_payment(what, request.remote or "")
        if named in self._closed:
            raise RefusedError(403, "session_closed", "this session is closed: its episode has ended")
        raise RefusedError(404, "unknown_session", "the URL names no session: use it as it was given")

    async def body_of(self, request: web.Request) -> bytes:
        """Return a request's body. Raises `RefusedError`."""
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                return await request.read()
        except TimeoutError as error:
            reason = f"the body did not come within {self._config.body_timeout_s:g} s"
            raise RefusedError(408, "body_timeout", reason, retry=True) from error
        except web.RequestPayloadError as error:
            reason = f"the body cannot be read as its headers say, such as Content-Encoding: {error}"
            raise RefusedError(400, "invalid_request", reason) from error
        except web.HTTPRequestEntityTooLarge as error:
            reason = (
                f"the body has more than {self._config.most_body_bytes} bytes: send less, such as smaller "
                "images, or raise actors.environment.gateway.most_body_bytes"
            )
            raise RefusedError(413, "request_too_large", reason) from error


def _attempt_of(request: web.Request, raw: bytes) -> Attempt:
    key, counted = request.headers.get("Idempotency-Key"), request.headers.get("x-stainless-retry-count")
    return Attempt.of(request.path, raw, key, counted)


def _tls(config: GatewayConfig) -> ssl.SSLContext | None:
    if config.certificate is None or config.certificate_key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(config.certificate, config.certificate_key)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"gateway.certificate={config.certificate} with certificate_key={config.certificate_key}: {error}"
        ) from error
    return context


def dialect_of(request: web.Request) -> Dialect:
    """Return the dialect of a request's path, or else that of its client."""
    if "method" in request.match_info:
        return GOOGLE
    spoken = {**DIALECTS, COUNT_TOKENS: ANTHROPIC}
    found = (dialect for ending, dialect in spoken.items() if request.path.endswith(ending))
    clients = {"anthropic-version": ANTHROPIC, "x-goog-api-key": GOOGLE, "x-goog-api-client": GOOGLE}
    named = (dialect for header, dialect in clients.items() if header in request.headers)
    return next(found, next(named, OPENAI_CHAT))


@web.middleware
async def _in_shape(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer whatever goes wrong in the shape of the request's API."""
    try:
        return await handler(request)
    except RefusedError as refusal:
        return _refused(request, refusal)
    except web.HTTPException as error:  # of the router
        reason = f"{request.method} {request.path}: {error.reason}"
        return _refused(request, RefusedError(error.status, "no_such_path", reason))
    except ConnectionError:
        raise
    except Exception:  # a fault of ours costs this request, and not the connection of others
        log.exception("gateway_request_failed", path=dialect_path(request))
        return _refused(request, RefusedError(500, "internal_error", "the gateway failed: its log says why"))


def dialect_path(request: web.Request) -> str:
    """Return a path for the log, which must not hold a session's key."""
    keys = (request.match_info.get(name) for name in ("session", "reward_key"))
    return next((request.path.replace(key, "...") for key in keys if key), request.path)


def _refused(request: web.Request, refusal: RefusedError) -> web.Response:
    headers = {"x-should-retry": "true" if refusal.retry else "false"}  # both companies' clients heed it
    body = dialect_of(request).error(refusal)
    return web.json_response(body, status=refusal.status, headers=headers)


def keys_of(request: web.Request) -> list[str]:
    """Return what may name the session or be a token: frameworks send ids of their own in `X-Session-ID`."""
    bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
    headers = (request.headers.get(name) for name in ("X-Session-ID", "x-api-key", "x-goog-api-key"))
    return [key for key in (*headers, bearer, request.query.get("key")) if key]
