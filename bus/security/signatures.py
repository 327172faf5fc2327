"""Signatures of the records that processes of a secured run act on: who may write each, and which is newest.

nats-server checks what a client publishes, and not where it asks for answers. So whoever acts on a record
verifies that a role which may write it has signed it, for this run and this name, and that it is not older
than one that was seen before."""

import base64
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path

import msgpack
import nkeys
import structlog
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from bus.codec import Message, decode, encode
from bus.errors import ConfigError, SchemaError, UnknownKeyError, UnsignedError
from bus.security.credentials import Credentials, load_credentials
from bus.security.record_rules import ROLE_KEYS, Order, rule_of
from bus.security.role_keys import RoleKeys, public_key, raw_key
from bus.security.whole_files import write_whole

DAY_NS = 86_400 * 10**9
MOST_AHEAD_NS = DAY_NS
"""A record that is signed for a later time than this from now is set aside: its signer could otherwise keep
the role's later records from being taken."""
SIGNED = ""
"""Name under which the newest version is that processes of this role have signed here, of whatever record."""


@dataclass(frozen=True)
class Seen:
    """A version of a record that was taken."""

    sequence: int
    digest: str
    """Digest of its content, in hexadecimal."""
    key: str
    """Public key of its signer."""


class SeenRecords:
    """Remembers the newest version of each record."""

    def __init__(self, path: Path | None = None) -> None:
        """Begin with what lies in `path`, which processes of one role may share; None keeps nothing."""
        self._path = path
        self._is_valid: Callable[[str], object] = bool
        self._is_refused = False
        self._newest = self._kept()
        self._is_saved = True

    @property
    def newest(self) -> dict[str, Seen]:
        """Return the newest version of each record by name, with that of `SIGNED`."""
        return self._newest

    def sign(self, sequence: int, key: str) -> None:
        """Note a version of any record that this process signs: one which is started again signs later ones,
        whatever its clock says by then."""
        self._newest[SIGNED] = Seen(sequence, "", key)
        self._is_saved = False

    def take(self, record: str, order: Order, version: Seen) -> None:
        """Note a version. Raises `UnsignedError` for one that is older than one that was taken."""
        if order == "any":
            return
        newest = self._newest.get(record)
        if newest is not None and version.sequence <= newest.sequence:
            if order == "newest" and version.digest == newest.digest:
                return
            where = f" ({self._path} remembers it)" if self._path is not None else ""
            behind_s = (newest.sequence - version.sequence) / 1e9
            raise UnsignedError(
                f"{record} is older than one that was seen before{where}, by {behind_s:.3g} s of their "
                "signers' clocks: if they are of two hosts, set the clock that is behind"
            )
        self._newest[record] = version
        self._is_saved = False

    def forget(self, is_valid: Callable[[str], object]) -> None:
        """Forget what keys have signed that are valid no more, in the file too."""
        self._is_valid = is_valid
        kept = {record: seen for record, seen in self._newest.items() if is_valid(seen.key)}
        self._is_saved = self._is_saved and kept.keys() == self._newest.keys()
        self._newest = kept

    def save(self) -> None:
        """Write what is new to the file, if the run has a directory here. A disk that refuses is logged once,
        and asked again with the next call."""
        if self._is_saved or self._path is None:
            return
        self._is_saved = True  # before the copy below: what another thread notes meanwhile is not
        newest = dict(self._newest)
        try:
            if not self._path.parent.is_dir():
                self._is_saved = False
                return
            for record, seen in self._kept().items():
                if record not in newest or newest[record].sequence < seen.sequence:
                    newest[record] = seen
            content = json.dumps({record: asdict(seen) for record, seen in newest.items()})
            write_whole(self._path, content.encode())
        except OSError as error:
            self._is_saved = False
            if not self._is_refused:
                log.warning("seen_records_not_saved", path=str(self._path), reason=str(error))
            self._is_refused = True
        else:
            self._is_refused = False

    def _kept(self) -> dict[str, Seen]:
        """Return what the file holds of keys that are valid. What is further ahead than a record may be was
        taken by a clock that was wrong, as those of all hosts may have been."""
        if self._path is None:
            return {}
        try:
            found = {
                record: Seen(int(seen["sequence"]), str(seen["digest"]), str(seen["key"]))
                for record, seen in json.loads(self._path.read_bytes()).items()
            }
        except FileNotFoundError:
            return {}
        except (
            OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError
        ) as error:  # fmt: skip
            if not self._is_refused:
                log.warning("seen_records_not_read", path=str(self._path), reason=str(error))
            return {}
        latest = time.time_ns() + MOST_AHEAD_NS
        return {
            record: seen
            for record, seen in found.items()
            if self._is_valid(seen.key) and seen.sequence <= latest
        }


log = structlog.get_logger()
REMIND_S = 60.0
"""Seconds between two lines of the log about records of one name."""
PURPOSE = "sluice record"


@dataclass(frozen=True, kw_only=True, slots=True)
class SignedRecord(Message, tag="signed"):
    """A record with the signature of a role of the run."""

    key: str
    """Public key of the signer."""
    sequence: int
    """Nanoseconds since the epoch by the signer's clock, and above all that the signer has seen."""
    content: bytes
    """The message; empty where the record was removed."""
    signature: bytes
    """Ed25519 over run, name, sequence and content."""


class Signatures:
    """Signs records by the key of this process's role, and verifies those of others."""

    def __init__(self, credentials: Credentials, path: Path, seen: Path | None = None) -> None:
        """Use `credentials`, which were read from `path`, where newer ones may come to lie. The file `seen`
        keeps which versions were taken."""
        self.role = credentials.role
        self.set_aside: Counter[str] = Counter()
        """Records that were not acted on, by name."""
        self.set_aside_s = -REMIND_S
        """When the last record was set aside, on the monotonic clock."""
        self._run = credentials.run
        self._run_key = credentials.run_key
        self._path = path
        self._file_ns = _changed_ns(path)
        self._seed = credentials.seed
        self._pair = nkeys.from_seed(bytearray(credentials.seed.encode()))
        self._key = public_key(credentials.seed)
        self.seen = SeenRecords(seen)
        self._ahead_ns = 0
        """How far the clock of another signer of this role's records is ahead of this host's, at least."""
        self._last = 0
        self._said_s: dict[str, float] = {}
        self.signed_keys = b""
        """The newest list of keys, as the run's own key has signed it."""
        self._keys = RoleKeys(revision=0)
        if not self.adopt(base64.b64decode(credentials.role_keys)):
            raise ConfigError(f"the keys in {path} are not signed by run {self._run!r}: copy the file again")
        for record, newest in self.seen.newest.items():
            self._follow(record, newest.sequence)

    # --- keys ---

    @property
    def keys(self) -> RoleKeys:
        return self._keys

    def adopt(self, data: bytes) -> bool:
        """Take over a list of keys; return whether it is signed by the run and not older than the one here.
        What was taken by a key that no role has any more is forgotten."""
        try:
            record = decode(data, SignedRecord)
            if record.key != self._run_key:
                return False
            self._verify(ROLE_KEYS, record)
            found = decode(record.content, RoleKeys)
        except SchemaError:
            return False
        if found.revision != record.sequence or found.revision < self._keys.revision:
            return False
        self._keys, self.signed_keys = found, data
        self.seen.forget(found.role_of)
        return True

    def renewed_seed(self) -> str:
        """Return the key of this role, by a newer credentials file where there is one."""
        if (changed_ns := _changed_ns(self._path)) != self._file_ns:
            try:
                self._take_over(load_credentials(self._path))
                self._file_ns = changed_ns
            except ConfigError as error:  # somebody may be replacing the file
                log.warning("credentials_not_renewed", reason=str(error))
        return self._seed

    def _take_over(self, found: Credentials) -> None:
        if (found.run, found.role, found.run_key) != (self._run, self.role, self._run_key):
            raise ConfigError(
                f"{self._path} is now for {found.role} of run {found.run!r}, or of another run of that name: "
                f"put back the file for {self.role} of run {self._run!r}"
            )
        self.adopt(base64.b64decode(found.role_keys))
        if found.seed != self._seed:
            self._seed, self._key = found.seed, public_key(found.seed)
            self._pair = nkeys.from_seed(bytearray(found.seed.encode()))
            log.info("credentials_renewed", path=str(self._path))

    # --- records ---

    def sealed(self, record: str, content: bytes) -> bytes:
        self._last = max(time.time_ns() + self._ahead_ns, self._last + 1)
        self.seen.sign(self._last, self._key)
        signature = self._pair.sign(_signed_bytes(self._run, record, self._last, content))
        return encode(SignedRecord(key=self._key, sequence=self._last, content=content, signature=signature))

    def opened(self, record: str, data: bytes) -> bytes:
        """Return the content of a record.

        Raises `UnsignedError` for one that must not be acted on, and `UnknownKeyError`, which is one too,
        where a newer list of keys might tell."""
        try:
            found = decode(data, SignedRecord)
        except SchemaError as error:
            raise UnsignedError(f"{record} is not signed ({error})") from None
        rule = rule_of(record)
        role = self._keys.role_of(found.key)
        if role is None:
            raise UnknownKeyError(f"{record} is signed with a key that no role of the run has")
        if role not in (*rule.writers, "operator"):
            raise UnsignedError(f"{record} is signed by {role}, which may not write it")
        self._verify(record, found)
        self._refuse_ahead(record, found)
        digest = blake2b(found.content, digest_size=16).hexdigest()
        self.seen.take(record, rule.order, Seen(found.sequence, digest, found.key))
        self._follow(record, found.sequence)
        return found.content

    def _follow(self, record: str, sequence: int) -> None:
        """Sign with later sequences than a version of a record that this process may write."""
        if record == SIGNED or self.role in (*rule_of(record).writers, "operator"):
            self._ahead_ns = max(self._ahead_ns, sequence - time.time_ns())
            self._last = max(self._last, sequence)

    def note(self, record: str, reason: str) -> None:
        """Count a record that was set aside, and log it now and then."""
        self.set_aside[record] += 1
        now = self.set_aside_s = time.monotonic()
        if now - self._said_s.get(record, -REMIND_S) >= REMIND_S:
            self._said_s[record] = now
            log.warning("record_set_aside", record=record, reason=reason, count=self.set_aside[record])

    def complaint(self) -> str:
        """Return which records were set aside within the last minute, for screens; empty for none."""
        if not self.set_aside or time.monotonic() - self.set_aside_s > REMIND_S:
            return ""
        names = ", ".join(f"{count} of {record!r}" for record, count in self.set_aside.most_common(3))
        return f"forged or old records set aside: {names}"

    def _verify(self, record: str, found: SignedRecord) -> None:
        signed = _signed_bytes(self._run, record, found.sequence, found.content)
        try:
            _verifier(found.key).verify(found.signature, signed)
        except InvalidSignature:
            raise UnsignedError(
                f"the signature of {record} is not of this record of run {self._run!r}"
            ) from None

    def _refuse_ahead(self, record: str, found: SignedRecord) -> None:
        ahead_ns = found.sequence - time.time_ns()
        if ahead_ns > MOST_AHEAD_NS:
            raise UnsignedError(
                f"{record} is signed for {ahead_ns / DAY_NS:.1f} days ahead: set the clocks of the hosts"
            )


def sign_keys(seed: str, run: str, keys: RoleKeys) -> bytes:
    """Return a list of keys with the signature of the run's own key, whose secret is `seed`."""
    content = encode(keys)
    pair = nkeys.from_seed(bytearray(seed.encode()))
    signature = pair.sign(_signed_bytes(run, ROLE_KEYS, keys.revision, content))
    return encode(
        SignedRecord(key=public_key(seed), sequence=keys.revision, content=content, signature=signature)
    )


def keys_in(data: bytes) -> RoleKeys:
    """Return a signed list of keys. Its signature is not looked at: it is for the directory that signs it."""
    return decode(decode(data, SignedRecord).content, RoleKeys)


def _signed_bytes(run: str, record: str, sequence: int, content: bytes) -> bytes:
    """Return what is signed: parts with their lengths, so that none can be taken for a part of another."""
    packed: bytes = msgpack.packb([PURPOSE, 1, run, record, sequence, content], use_bin_type=True)
    return packed


@cache
def _verifier(key: str) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(raw_key(key))


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
