"""The keys of a run's roles: a list that the run's own key signs, so that a role's key can be exchanged.

Each credentials file holds the list as it was when the file was made. A newer one comes by the key `keys`."""

import base64
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

import nkeys

from bus.codec import Json, Message
from bus.errors import SchemaError

NKEY_BYTES = 35
"""Size of an nkey's prefix, of the public key itself and of its checksum, together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleKeys(Message, tag="role_keys"):
    """Public keys of a run's roles. A list of a higher revision replaces one of a lower."""

    revision: int
    keys: dict[str, Json] = field(default_factory=dict)
    """Keys of each role, newest last: a role has two while its key is exchanged."""

    def check(self) -> None:
        for role, found in self.keys.items():
            if not isinstance(found, list):
                raise SchemaError(f"the keys of {role} are no list")
            for key in found:
                raw_key(str(key))

    def of(self, role: str) -> tuple[str, ...]:
        """Return the keys of a role, newest last."""
        found = self.keys.get(role)
        return tuple(map(str, found)) if isinstance(found, list) else ()

    def role_of(self, key: str) -> str | None:
        """Return the role that a key belongs to; None where no role has it."""
        return next((role for role in self.keys if key in self.of(role)), None)

    def replaced(self, role: str, keys: Iterable[str]) -> "RoleKeys":
        """Return the next revision, in which a role has other keys."""
        return RoleKeys(revision=self.revision + 1, keys={**self.keys, role: list(keys)})


def new_seed() -> str:
    """Return the secret key of a new nkey user."""
    return bytes(nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER)).decode()


def public_key(seed: str) -> str:
    return bytes(nkeys.from_seed(bytearray(seed.encode())).public_key).decode()


def raw_key(key: str) -> bytes:
    """Return the 32 bytes of a public nkey. Raises `SchemaError` for a text that is none."""
    try:
        found = base64.b32decode(key + "=" * (-len(key) % 8))
    except ValueError:
        found = b""
    if len(found) != NKEY_BYTES:
        raise SchemaError(f"{key[:60]!r} is no public nkey")
    return found[1:-2]
