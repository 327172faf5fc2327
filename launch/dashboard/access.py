"""Who may read the dashboard: everybody on this host, or whoever shows the token."""

import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from http.cookies import CookieError, SimpleCookie
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bus.errors import ConfigError
from bus.security.credentials import load_credentials
from bus.server.nats_server import is_loopback
from launch.run_view.run_files import RunFiles
from launch.settings.environment_variables import DASHBOARD_TOKEN_VARIABLE

PURPOSE = "dashboard"
COOKIE = "sluice-dashboard"
FEWEST_CHARACTERS = 16
LOGIN = "/login"
OPEN_PATHS = (LOGIN, "/static/style.css")
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""Headers of every answer: the page loads nothing from elsewhere, and no other page may frame it."""


@dataclass(frozen=True)
class Address:
    """Where the dashboard listens, and the files of its TLS certificate if it has one."""

    host: str = "127.0.0.1"
    port: int = 8765
    certificate: Path | None = None
    certificate_key: Path | None = None

    @property
    def url(self) -> str:
        scheme = "http" if self.certificate is None else "https"
        return f"{scheme}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def dashboard_token(creds: Path | None) -> str | None:
    """Return the token that readers show: the variable's, or one made of the credentials; None without both.
    Raises `ConfigError` for a token that could be guessed."""
    given = os.environ.get(DASHBOARD_TOKEN_VARIABLE, "").strip()  # of a file it ends with a newline
    if not given:
        return None if creds is None else load_credentials(creds).token(PURPOSE)
    if len(given) < FEWEST_CHARACTERS:
        raise ConfigError(
            f"{DASHBOARD_TOKEN_VARIABLE} has {len(given)} characters, which can be guessed: give it at least "
            f"{FEWEST_CHARACTERS}, such as those of `openssl rand -hex 24`"
        )
    return given


def refuse_half_certificate(address: Address) -> None:
    """Raise `ConfigError` for a certificate without its key, or a key without its certificate."""
    if (address.certificate is None) != (address.certificate_key is None):
        raise ConfigError("--certificate and --certificate-key are of no use alone: give both, or none")


def refuse_open_dashboard(address: Address, token: str | None, *, insecure: bool) -> None:
    """Raise `ConfigError` for a dashboard beyond loopback that everybody could read, or whose token and
    contents could be read on the way, unless `insecure` allows the latter."""
    if is_loopback(address.host):
        return
    if token is None:
        raise ConfigError(
            f"--host {address.host} would show every run and trajectory to everybody on the network: give "
            f"--creds of the bus, whose token `launch dashboard --show-token` prints, or a token of your own "
            f"in {DASHBOARD_TOKEN_VARIABLE}; or listen at 127.0.0.1 and reach it by `ssh -L`"
        )
    if address.certificate is None and not insecure:
        raise ConfigError(
            f"--host {address.host} without TLS would show the token to the network: give --certificate and "
            "--certificate-key, listen at 127.0.0.1 behind a proxy that speaks TLS or by `ssh -L`, or give "
            "--insecure on a network of your own"
        )


def is_open_to_all(run: Path) -> bool:
    """Return whether the bus of a run lets everybody in who reaches it, by the settings in its directory."""
    settings = RunFiles(run, lenient=True).settings
    return bool(settings) and not settings.get("bus.creds") and "@" not in str(settings.get("bus.url"))


class Access:
    """Lets a request pass that shows the token, as a cookie or as a bearer; every one where there is none. A
    dashboard on loopback without a token refuses requests for other host names: a page elsewhere whose name
    was made to lead here could read it otherwise. With one, a proxy may lead here from any name."""

    def __init__(self, app: ASGIApp, address: Address, token: str | None) -> None:
        self._app = app
        self._address = address
        self._token = token
        self._key = secrets.token_bytes(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        answer = self._refusal(scope) or self._app
        await answer(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers, path = Headers(scope=scope), scope["path"]
        if self._token is None:
            return self._refused_name(headers.get("host", ""))
        if path in OPEN_PATHS or self._is_allowed(headers):
            return None
        if path.startswith("/api/"):
            return PlainTextResponse("show the token: Authorization: Bearer TOKEN\n", 401)
        return RedirectResponse(LOGIN, 303)

    def _refused_name(self, host: str) -> Response | None:
        name = (host.rpartition(":")[0] or host).strip("[]")
        if not is_loopback(self._address.host) or name in (*LOOPBACK_NAMES, self._address.host):
            return None
        return PlainTextResponse(f"this dashboard answers at {self._address.url} only\n", 421)

    def _is_allowed(self, headers: Mapping[str, str]) -> bool:
        scheme, _, shown = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.is_token(shown):
            return True
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return False
        return cookie is not None and hmac.compare_digest(cookie.value.encode(), self._session.encode())

    def is_token(self, shown: str) -> bool:
        return self._token is not None and hmac.compare_digest(shown.strip().encode(), self._token.encode())

    @property
    def _cookie(self) -> str:
        """Return the cookie's name: browsers send a host's cookies to all of its ports."""
        return f"{COOKIE}-{self._address.port}"

    @property
    def _session(self) -> str:
        """Return what the cookie holds: it is of no use once this process has ended."""
        return blake2b((self._token or "").encode(), key=self._key, digest_size=24).hexdigest()

    def let_in(self, response: Response) -> Response:
        """Give the response the cookie by which its browser is let in from now on."""
        secure = self._address.certificate is not None
        response.set_cookie(self._cookie, self._session, httponly=True, samesite="strict", secure=secure)
        return response
