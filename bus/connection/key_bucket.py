"""The key-value bucket of a run. On a secured bus each key holds a signed record, and is read as absent where
nobody who may write it has signed what lies there."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from math import nan
from typing import TYPE_CHECKING

import nats.errors
import structlog
from nats.js.client import JetStreamContext
from nats.js.errors import KeyWrongLastSequenceError, NotFoundError
from nats.js.kv import KV_OP, KeyValue

from bus.errors import BusError, UnknownKeyError, UnsignedError
from bus.security.record_rules import ROLE_KEYS
from bus.topology import Topology, ensure_keys
from bus.waiting import cancelled

if TYPE_CHECKING:  # loads cryptography, which only a secured bus needs
    from bus.security.signatures import Signatures

log = structlog.get_logger()
LOOK_S = 5.0
"""Seconds between two looks at the list of the roles' keys, and at the credentials file of this process."""
LOOK_AGAIN_S = 1.0
"""Shortest time between two looks where a record has an unknown key."""
FIRST_LOOK_S = 2.0
"""Longest time that a process which has connected waits for the list of the roles' keys."""
KEEPERS = ("storage", "operator")
"""Roles that write the list of the roles' keys again where the bus has none, or an older one."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What lies under a key."""

    content: bytes | None
    """The message; None where there is none, or it was set aside."""
    revision: int
    """Revision of what lies there, whatever it is; 0 where nothing does."""
    written_s: float = nan
    """Time of the server's clock at which it stored that revision, in seconds since the epoch."""
    set_aside: bool = False
    """Whether something lies there that must not be acted on."""


class KeyBucket:
    """Reads and writes keys. Its methods raise `BusError` where the bus refuses or is away."""

    def __init__(self, js: JetStreamContext, topology: Topology, signatures: "Signatures | None") -> None:
        self._js = js
        self._topology = topology
        self._signatures = signatures
        self._bucket: KeyValue | None = None
        self._looked_s = -LOOK_AGAIN_S
        self._set_aside: dict[str, int] = {}
        """Revision of each key that was set aside last: it is counted once, however often it is read."""

    async def create(self) -> None:
        """Create the bucket if it does not exist. What an operator has set of it stays."""
        try:
            await ensure_keys(self._js, self._topology)
            self._bucket = await self._js.key_value(self._topology.bucket)
        except nats.errors.Error as error:
            raise BusError(f"cannot create the keys of run {self._topology.run!r}: {error}") from error

    async def read(self, key: str) -> Entry:
        entry = await self._read(key)
        if entry.content is None or self._signatures is None:
            return entry
        try:
            return replace(entry, content=await self._opened(key, entry.content) or None)
        except UnsignedError:
            entry = await self._read(key)  # a notice of the next version may have overtaken the answer
        if entry.content is None:
            return entry
        try:
            return replace(entry, content=await self._opened(key, entry.content) or None)
        except UnsignedError as error:
            if self._set_aside.get(key) != entry.revision:
                self._set_aside[key] = entry.revision
                self._signatures.note(key, str(error))
            return replace(entry, content=None, set_aside=True)

    async def write(self, key: str, content: bytes) -> None:
        try:
            await (await self._open()).put(key, self.sealed(key, content))
        except nats.errors.Error as error:
            raise BusError(f"cannot write {key!r} to the bus: {error}") from error

    async def swap(self, key: str, content: bytes, revision: int) -> int | None:
        """Set `key` if it still has `revision`; with 0 if it is read as absent. Return the new revision, or
        else None."""
        try:
            bucket = await self._open()
            try:
                if revision == 0:
                    return int(await bucket.create(key, self.sealed(key, content)))
                return int(await bucket.update(key, self.sealed(key, content), last=revision))
            except KeyWrongLastSequenceError:
                if revision != 0 or self._signatures is None:
                    return None
            found = await self.read(key)
            if found.content is not None:
                return None
            return int(await bucket.update(key, self.sealed(key, content), last=found.revision))
        except KeyWrongLastSequenceError:
            return None
        except nats.errors.Error as error:
            raise BusError(f"cannot write {key!r} to the bus: {error}") from error

    async def remove(self, key: str) -> None:
        """Remove `key`. On a secured bus a signed record without content takes its place."""
        if self._signatures is not None:
            await self.write(key, b"")
            return
        try:
            await (await self._open()).delete(key)
        except nats.errors.Error as error:
            raise BusError(f"cannot delete {key!r} from the bus: {error}") from error

    async def names(self, prefix: str) -> list[str]:
        """List the keys that begin with `prefix` and a dot; removed ones may be among them. This is one
        request. A watch would leave a consumer on the server each time."""
        bucket = self._topology.bucket
        before = f"$KV.{bucket}."
        try:
            found = await self._js.stream_info(f"KV_{bucket}", subjects_filter=f"{before}{prefix}.>")
        except nats.errors.Error as error:
            raise BusError(f"cannot list the keys {prefix!r} on the bus: {error}") from error
        return sorted(subject.removeprefix(before) for subject in found.state.subjects or {})

    # --- signatures ---

    def sealed(self, record: str | None, content: bytes) -> bytes:
        """Return what travels for a message: signed, where the bus is secured and it is a record."""
        if self._signatures is None or record is None:
            return content
        return self._signatures.sealed(record, content)

    async def opened(self, record: str | None, data: bytes) -> bytes:
        """Return the content of a record that came on a subject. Raises `UnsignedError` for one that must not
        be acted on, which is counted then."""
        if self._signatures is None or record is None:
            return data
        try:
            return await self._opened(record, data)
        except UnsignedError as error:
            self._signatures.note(record, str(error))
            raise

    async def _opened(self, record: str, data: bytes) -> bytes:
        assert self._signatures is not None
        try:
            return self._signatures.opened(record, data)
        except UnknownKeyError:
            if time.monotonic() - self._looked_s < LOOK_AGAIN_S:
                raise
            await self.look_at_role_keys()
        return self._signatures.opened(record, data)

    async def look_at_role_keys(self) -> None:
        """Take over the list of the roles' keys from the bus, or put it there if the bus lacks the newest."""
        signatures, self._looked_s = self._signatures, time.monotonic()
        assert signatures is not None
        entry = await self._read(ROLE_KEYS)
        if entry.content is not None and signatures.adopt(entry.content):
            return
        if entry.content is not None and self._set_aside.get(ROLE_KEYS) != entry.revision:
            self._set_aside[ROLE_KEYS] = entry.revision
            signatures.note(ROLE_KEYS, "it is older than the list here, or not signed by the run")
        if signatures.role in KEEPERS:
            try:
                await (await self._open()).put(ROLE_KEYS, signatures.signed_keys)
            except nats.errors.Error as error:
                raise BusError(f"cannot write {ROLE_KEYS!r} to the bus: {error}") from error

    @asynccontextmanager
    async def follows_role_keys(self) -> AsyncIterator[None]:
        """Look at the list of the roles' keys now, and every few seconds while inside."""
        if self._signatures is None:
            yield
            return
        await self._try_to_look(FIRST_LOOK_S)
        following = asyncio.create_task(self._follow(), name="follow the roles' keys")
        try:
            yield
        finally:
            await cancelled(following)
            await asyncio.to_thread(self._signatures.seen.save)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self._try_to_look(LOOK_S)
            assert self._signatures is not None
            await asyncio.to_thread(self._signatures.seen.save)

    async def _try_to_look(self, timeout_s: float) -> None:
        assert self._signatures is not None
        self._signatures.renewed_seed()
        try:
            async with asyncio.timeout(timeout_s):
                await self.look_at_role_keys()
        except (TimeoutError, BusError) as error:  # the bus is away, or the run has no keys yet
            log.debug("role_keys_not_read", reason=str(error) or "no answer")

    # --- bytes ---

    async def _read(self, key: str) -> Entry:
        """Return the bytes under a key. An entry of nats-py's bucket would lack the time."""
        bucket = self._topology.bucket
        try:
            found = await self._js.get_msg(f"KV_{bucket}", subject=f"$KV.{bucket}.{key}")
        except NotFoundError:
            return Entry(None, 0)
        except nats.errors.Error as error:
            raise BusError(f"cannot read {key!r} from the bus: {error}") from error
        if KV_OP in (found.headers or {}):  # the mark of a key that was removed
            return Entry(None, 0)
        return Entry(found.data or b"", found.seq, written_s=found.time.timestamp())

    async def _open(self) -> KeyValue:
        if self._bucket is None:
            self._bucket = await self._js.key_value(self._topology.bucket)
        return self._bucket
