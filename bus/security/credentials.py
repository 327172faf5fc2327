"""A credentials file: who a process is on a secured bus, and how it knows the bus. Also the bus's TLS."""

import json
import ssl
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from bus.errors import ConfigError

VARIABLE = "SLUICE_CREDS"
"""Environment variable that names the credentials file of a process without --creds."""
BUS_NAME = "sluice-bus"
"""Name in the bus's certificate, whatever its address. No other certificate of its authority has it."""


@dataclass(frozen=True)
class Credentials:
    """What a process needs to be let in by a secured bus."""

    run: str
    role: str
    """One of `bus.security.permissions.ROLES`."""
    url: str
    """URL of the bus, for a process that is given no other."""
    seed: str = field(repr=False)
    """Secret key of an nkey user."""
    authority: str
    """Certificate of the bus's own authority, as PEM."""
    run_key: str
    """Public key of the run itself, which signs the list of its roles' keys."""
    role_keys: str
    """The run's list of keys when the file was made (`bus.security.role_keys`), signed, as base64."""
    stream_secret: str = field(repr=False)
    """Secret of the role by which it reaches the run's streams (`bus.security.stream_access`). It stays when
    the key is exchanged."""

    def token(self, purpose: str) -> str:
        """Return a secret that whoever has this file knows, and from which its key cannot be told."""
        return blake2b(f"{self.run}/{purpose}".encode(), key=self.seed.encode(), digest_size=24).hexdigest()

    def tls(self) -> ssl.SSLContext:
        """Return a context that trusts certificates of the bus's authority, and no others."""
        context = ssl.create_default_context(cadata=self.authority)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        return context


def load_credentials(path: Path) -> Credentials:
    """Read a file that `launch bus --secure` made.

    Raises `ConfigError` for a file that is missing, that others may read, or that holds no credentials. The
    error never says what is in it."""
    remedy = "give --creds one of the files that `launch bus --secure` made"
    try:
        mode = path.stat().st_mode & 0o077
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise ConfigError(f"cannot read the credentials {path} ({reason}): {remedy}") from None
    if mode:
        raise ConfigError(f"the credentials {path} can be read by others: chmod 600 {path}")
    try:
        return Credentials(**json.loads(text))
    except (ValueError, TypeError):
        raise ConfigError(f"{path} holds no credentials: {remedy}") from None
