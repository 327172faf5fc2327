"""The newest version that a process has taken of each signed record; a file keeps them over its restart."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from bus.errors import UnsignedError
from bus.security.record_rules import Order

log = structlog.get_logger()


@dataclass(frozen=True)
class Seen:
    """A version of a record that was taken."""

    sequence: int
    digest: str
    """Of its content, in hexadecimal."""
    key: str
    """Public key of its signer."""


class SeenRecords:
    """Remembers the newest version of each record."""

    def __init__(self, path: Path | None = None) -> None:
        """Begin with what lies in `path`, which processes of one role may share; None keeps nothing."""
        self._path = path
        self._newest = self._kept()
        self._is_saved = True

    @property
    def newest(self) -> dict[str, Seen]:
        """Return the newest version of each record by name."""
        return self._newest

    def take(self, record: str, order: Order, version: Seen) -> None:
        """Note a version. Raises `UnsignedError` for one that is older than one that was taken."""
        if order == "any":
            return
        newest = self._newest.get(record)
        if newest is not None and version.sequence <= newest.sequence:
            if order == "newest" and version.digest == newest.digest:
                return
            where = f" ({self._path} remembers it)" if self._path is not None else ""
            raise UnsignedError(f"{record} is older than one that was seen before{where}")
        self._newest[record] = version
        self._is_saved = False

    def forget(self, is_valid: Callable[[str], object]) -> None:
        """Forget what keys have signed that are valid no more."""
        kept = {record: seen for record, seen in self._newest.items() if is_valid(seen.key)}
        self._is_saved = self._is_saved and kept.keys() == self._newest.keys()
        self._newest = kept

    def save(self) -> None:
        """Write what is new to the file, if the run has a directory here. A disk that refuses is logged."""
        if self._is_saved or self._path is None or not self._path.parent.is_dir():
            return
        self._is_saved = True  # before the copy below: what another thread notes meanwhile is not
        newest = dict(self._newest)
        for record, seen in self._kept().items():
            if record not in newest or newest[record].sequence < seen.sequence:
                newest[record] = seen
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            with temporary.open("w") as file:
                json.dump({record: asdict(seen) for record, seen in newest.items()}, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
        except OSError as error:
            self._is_saved = False
            log.warning("seen_records_not_saved", path=str(self._path), reason=str(error))

    def _kept(self) -> dict[str, Seen]:
        if self._path is None:
            return {}
        try:
            found = json.loads(self._path.read_bytes())
            return {
                record: Seen(int(seen["sequence"]), str(seen["digest"]), str(seen["key"]))
                for record, seen in found.items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            log.warning("seen_records_not_read", path=str(self._path), reason=str(error))
            return {}
