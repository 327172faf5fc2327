"""The account of trajectories: small files of what was sent, acknowledged, dropped and trained on.

Each process writes files of its own, which `launch verify` compares with the store
(launch/verify). A file begins with a line of JSON that says whose it is; then records of 72
bytes follow, each with a checksum. The kernel has a record when `add` returns, so that a kill of the process
loses none; a power cut may lose what was written in the seconds before it, for only a finished file is
synced. A file ends at `FILE_BYTES`, and the oldest of a directory are removed above `DIRECTORY_BYTES`."""

import json
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from enum import IntEnum
from functools import cache
from math import isnan, nan
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints
from urllib.parse import quote, unquote

import msgpack
import structlog
import xxhash

from bus.codec import Dtype
from bus.trajectory import Trajectory
from storage.disk.atomic_files import make_directory
from storage.disk.host_identity import host_identity

APART = frozenset({"reward", "reward_source", "reward_due"})
"""Fields outside the digest: a reward may be given after its trajectory was stored."""
_pack: Callable[[Any], bytes] = msgpack.packb


def content_digest(trajectory: Trajectory) -> bytes:
    """Return the xxh3-128 of a trajectory without its reward: 16 bytes, the same in every process.

    It covers each field by name, but for those that have their default: so a field that a later build adds
    leaves the digests of earlier trajectories as they are. Images count by their own digests."""
    declared = _declared()
    digest = xxhash.xxh3_128()
    lengths = []
    for array in declared.arrays(trajectory):
        lengths.append(len(array))
        digest.update(array.tobytes())
    plain = [
        (name, _plain(value) if isinstance(value, tuple) else value)
        for name, value, default in zip(
            declared.names, declared.others(trajectory), declared.defaults, strict=True
        )
        if value is not default and value != default
    ]
    digest.update(_pack((lengths, plain)))
    return digest.digest()


class _Declared(NamedTuple):
    arrays: Callable[[Trajectory], tuple[Any, ...]]
    others: Callable[[Trajectory], tuple[Any, ...]]
    names: tuple[str, ...]
    """Names of the others."""
    defaults: tuple[Any, ...]
    """Values of the others that add nothing to the digest."""


@cache
def _declared() -> _Declared:
    hints = get_type_hints(Trajectory, include_extras=True)
    arrays = [name for name, hint in hints.items() if any(isinstance(one, Dtype) for one in get_args(hint))]
    others = [one for one in fields(Trajectory) if one.name not in APART and one.name not in arrays]
    names = [one.name for one in others]
    made = [one.default if one.default_factory is MISSING else one.default_factory() for one in others]
    return _Declared(attrgetter(*arrays), attrgetter(*names), tuple(names), tuple(made))


def _plain(value: Any) -> Any:
    """Return a tuple as lists and scalars; a `NamedTuple` without trailing defaults and bytes of images."""
    if not hasattr(value, "_fields"):
        return [_plain(one) if isinstance(one, tuple) else one for one in value]
    shape, found = _shape(value.__class__), list(value)
    for at in shape.fractions:
        if found[at] is not None:
            found[at] = float(found[at])
    for at in shape.images:
        found[at] = b""
    while len(found) > shape.required and found[-1] == shape.defaults[len(found) - 1 - shape.required]:
        found.pop()
    return found


class _Shape(NamedTuple):
    fractions: tuple[int, ...]
    """Places of numbers with a fraction: decoding makes an integer there a float."""
    images: tuple[int, ...]
    """Places of the bytes of an image, whose digest is beside them."""
    required: int
    """Fields without a default, which come first."""
    defaults: tuple[Any, ...]


@cache
def _shape(kind: Any) -> _Shape:
    hints = get_type_hints(kind)
    places = {name: at for at, name in enumerate(kind._fields)}
    fractions = tuple(places[name] for name, hint in hints.items() if hint in (float, float | None))
    images = tuple(at for name, at in places.items() if name == "data")
    defaults = tuple(kind._field_defaults.values())
    return _Shape(fractions, images, len(places) - len(defaults), defaults)


log = structlog.get_logger()
ACTORS, TRAINED, GIVEN = "account/actors", "account/trained", "account/rewards"
"""Directories below that of a run: what its actors on this host have published, its learners' steps, and the
late rewards that were given from this host."""
DROPPED = ".dropped"
"""Directory below that of a store: what its shard did not store."""
FORMAT = 1
SUFFIX = ".records"
INCOMPLETE = ".incomplete"
"""Suffix of a file named after a writer, some of whose records were removed or dropped. It holds the name
where that is too long for its own, and is empty else: a full disk takes it."""
FILE_BYTES = 64 << 20
"""Size at which a file is followed by the next: about 900,000 records."""
DIRECTORY_BYTES = 1 << 30
"""Size of all files of one directory above which the oldest are removed: about 7 million trajectories."""
PENDING_BYTES = 4 << 20
"""Records that are kept in memory while the disk refuses them; older ones are dropped."""
LONGEST_NAME = 200
"""Characters of a writer's name in the names of its files."""
_BODY = struct.Struct("<BBxxIqddqd16s")
"""Kind, flag, sample, lease, the two times, number, reward and digest."""
_CHECK = struct.Struct("<Q")
RECORD_BYTES = _BODY.size + _CHECK.size


class Kind(IntEnum):
    """What a record says of a trajectory."""

    SENT = 1
    """An actor is about to publish it."""
    ACKNOWLEDGED = 2
    """The bus has acknowledged it; `number` is its message's on the stream, `flag` whether the bus had a
    message of that name before."""
    DROPPED = 3
    """A shard received it and did not store it; `number` is a `DropReason`."""
    TRAINED = 4
    """A learner trained on the trajectory; `number` is the step, `reward` the one that it used."""
    GIVEN = 5
    """Somebody is about to give the trajectory this late reward; its digest is not known, and zero."""


class DropReason(IntEnum):
    """Why a shard stores nothing of what it received."""

    HELD = 1
    """A trajectory of this name is stored already: the lease was rolled out more than once."""
    CLOSED = 2
    """The group was closed short without the trajectory."""
    SETTLED = 3
    """The lease is settled: trained on, or rejected."""


class Copy(NamedTuple):
    """A trajectory as one process had it: its id, its digest and its reward."""

    lease_id: int
    sample: int
    digest: bytes
    reward: float | None
    """None where it was due."""

    @classmethod
    def of(cls, trajectory: Trajectory) -> "Copy":
        """Return the copy that a trajectory is."""
        reward = None if trajectory.reward_due else float(trajectory.reward)
        return cls(trajectory.lease_id, trajectory.sample, content_digest(trajectory), reward)


class AccountRecord(NamedTuple):
    """What one process says of a trajectory."""

    kind: Kind
    copy: Copy
    number: int = 0
    flag: bool = False
    since_s: float = 0.0
    """When the trajectory was sent, by the monotonic clock of the host; 0 where that is not known."""
    written_s: float = 0.0
    """When the record was made, by the same clock."""


@dataclass(frozen=True)
class Owner:
    """Whose a file is."""

    writer: str
    """Name of the actor or the shard, incarnation of the learner."""
    run: str = ""
    """Identity of the run; empty where the directory is the run's own."""
    host: str = ""
    """Identity of the host since its last boot: only times of one host can be compared."""
    format: int = FORMAT


class AccountWriter:
    """Appends records to the files of one process. Threads may share it. A disk that refuses costs no work:
    records wait in memory, `PENDING_BYTES` of them at most."""

    def __init__(self, directory: Path, writer: str) -> None:
        """Write nothing yet; the first record makes the directory and a file."""
        self._directory = directory
        self._writer = writer
        self._run = ""
        self._file: int | None = None
        self._path: Path | None = None
        self._size = 0
        self._pending = b""
        self._refused = False
        self._has_dropped = False
        self._mutex = threading.Lock()

    def add(self, records: Sequence[AccountRecord], *, run: str = "") -> None:
        """Append records, which are of the run with that identity."""
        if not records:
            return
        with self._mutex:
            if self._file is not None and run != self._run:
                self._end_file()
            self._run = run
            self._pending += b"".join(map(_packed, records))
            try:
                self._write()
            except OSError as error:
                self._keep_pending(error)
            else:
                self._refused = False

    def close(self) -> None:
        """Sync and close the file; more records would begin another."""
        with self._mutex:
            self._end_file()

    def _write(self) -> None:
        if self._file is not None and self._size >= FILE_BYTES:
            self._end_file()
        if self._file is None:
            self._begin_file()
        assert self._file is not None
        done = 0
        try:
            while done < len(self._pending):
                done += os.write(self._file, self._pending[done:])
        finally:  # what was cut off within a record ends this file, and begins the next one whole
            self._pending = self._pending[done - done % RECORD_BYTES :]
            self._size += done

    def _begin_file(self) -> None:
        make_directory(self._directory)
        _remove_oldest(self._directory)
        if self._has_dropped:
            _mark_incomplete(self._directory, self._writer)
            self._has_dropped = False
        self._path = self._directory / f"{_file_name(self._writer)}-{time.time_ns()}{SUFFIX}"
        owner = Owner(self._writer, self._run, host_identity())
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        self._size = os.write(self._file, json.dumps(asdict(owner)).encode() + b"\n")

    def _end_file(self) -> None:
        if self._file is None:
            return
        try:
            os.fsync(self._file)
        except OSError as error:
            log.warning("account_not_synced", path=str(self._path), reason=str(error))
        os.close(self._file)
        self._file = None

    def _keep_pending(self, error: OSError) -> None:
        """Keep what the disk refuses for the next file, as far as memory is to be used for it."""
        if not self._refused:
            log.warning("account_not_written", directory=str(self._directory), reason=str(error))
        self._refused = True
        if self._file is not None:
            os.close(self._file)
            self._file = None
        excess = len(self._pending) - PENDING_BYTES
        if excess > 0:
            self._has_dropped = True
            self._pending = self._pending[-(-excess // RECORD_BYTES) * RECORD_BYTES :]


@dataclass
class RecordFile:
    """What a file of records holds."""

    path: Path
    owner: Owner
    records: list[AccountRecord]
    garbled: int = 0
    """Records that do not match their checksum."""


def read_records(directory: Path, *, run: str = "") -> Iterator[RecordFile]:
    """Yield every file of a directory, which may be missing and may be written to, in the order of its name.

    Files of another run than the one with the identity `run` are left out, and what a kill cut short is.
    Directories below are read too."""
    for path in sorted(directory.rglob(f"*{SUFFIX}")):
        try:
            content = path.read_bytes()
        except FileNotFoundError:  # the writer has just removed its oldest file
            continue
        header, newline, body = content.partition(b"\n")
        owner = _owner(header) if newline else None
        if owner is not None and owner.run in ("", run):
            yield _records_of(path, owner, body)


def _owner(header: bytes) -> Owner | None:
    try:
        found = Owner(**json.loads(header))
    except (ValueError, TypeError):
        return None
    return found if found.format == FORMAT else None


def _records_of(path: Path, owner: Owner, body: bytes) -> RecordFile:
    file = RecordFile(path, owner, [])
    for at in range(0, len(body) - RECORD_BYTES + 1, RECORD_BYTES):
        packed = body[at : at + _BODY.size]
        if _CHECK.unpack_from(body, at + _BODY.size)[0] != xxhash.xxh3_64_intdigest(packed):
            file.garbled += 1
            continue
        kind, flag, sample, lease_id, since_s, written_s, number, reward, digest = _BODY.unpack(packed)
        copy = Copy(lease_id, sample, digest, None if isnan(reward) else reward)
        file.records.append(AccountRecord(Kind(kind), copy, number, bool(flag), since_s, written_s))
    return file


def _packed(record: AccountRecord) -> bytes:
    copy = record.copy
    reward = nan if copy.reward is None else copy.reward
    body = _BODY.pack(
        record.kind, record.flag, copy.sample, copy.lease_id,
        record.since_s, record.written_s, record.number, reward, copy.digest,
    )  # fmt: skip
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))


def _remove_oldest(directory: Path) -> None:
    sized = sorted(
        ((path, path.stat()) for path in directory.glob(f"*{SUFFIX}")), key=lambda one: one[1].st_mtime
    )
    total = sum(stat.st_size for _, stat in sized)
    for path, stat in sized:
        if total + FILE_BYTES <= DIRECTORY_BYTES:
            return
        with path.open("rb") as file:
            owner = _owner(file.readline())
        named = unquote(path.name.removesuffix(SUFFIX).rpartition("-")[0])
        _mark_incomplete(directory, owner.writer if owner is not None else named)
        path.unlink(missing_ok=True)
        total -= stat.st_size


def _mark_incomplete(directory: Path, writer: str) -> None:
    name = _file_name(writer)
    (directory / f"{name}{INCOMPLETE}").write_text("" if unquote(name) == writer else writer)


def _file_name(writer: str) -> str:
    quoted = quote(writer, safe=" ")
    return quoted if len(quoted) <= LONGEST_NAME else xxhash.xxh3_128_hexdigest(writer.encode())


def incomplete_writers(directory: Path) -> set[str]:
    """Return the writers some of whose records in this directory, or below it, are known to be gone."""
    marks = directory.rglob(f"*{INCOMPLETE}")
    return {path.read_text() or unquote(path.name.removesuffix(INCOMPLETE)) for path in marks}
