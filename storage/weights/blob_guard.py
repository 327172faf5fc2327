"""Keeps strangers out of a server of blobs: a bearer token, and TLS with a certificate that readers check.

Token and certificate are made when the server starts. They travel over a secured bus alone, to those who may
ask for them there."""

import hmac
import os
import secrets
import ssl
import tempfile
from pathlib import Path

from aiohttp import web

from bus.errors import BusError
from bus.security.certificates import make_certificate, pem
from bus.weight_requests import BlobAccess

SERVER_NAME = "sluice-weights"
"""Name in the certificate of every such server, whatever its address."""


class BlobGuard:
    """Token and certificate of one server."""

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec  # only a secured run needs it

        key = ec.generate_private_key(ec.SECP256R1())
        certificate = pem(make_certificate(SERVER_NAME, key))
        self.access = BlobAccess(token=secrets.token_urlsafe(32), certificate=certificate.decode())
        self.context = _server_context(certificate + pem(key))

    def refuse_stranger(self, request: web.BaseRequest) -> None:
        """Raise `HTTPUnauthorized` for a request without the token."""
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(given, bearer(self.access).encode()):
            raise web.HTTPUnauthorized(headers={"WWW-Authenticate": "Bearer"})


def bearer(access: BlobAccess) -> str:
    """Return the header by which a reader shows its token."""
    return f"Bearer {access.token}"


def reader_context(access: BlobAccess) -> ssl.SSLContext:
    """Return a context that trusts the server's own certificate, and no others. Raises `BusError` where that
    is no certificate: other hosts choose what they announce."""
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=access.certificate)
    except (ssl.SSLError, ValueError, TypeError) as error:
        raise BusError(f"a server of weights announces what is no certificate: {error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _server_context(certificate_and_key: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    file, path = tempfile.mkstemp(prefix="sluice-")  # ssl reads files only; this one is the owner's alone
    try:
        with os.fdopen(file, "wb") as written:
            written.write(certificate_and_key)
        context.load_cert_chain(path)
    finally:
        Path(path).unlink()
    return context
