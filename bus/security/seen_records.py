"""The newest version that a process has taken of each signed record; a file keeps them over its restart."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from bus.errors import UnsignedError
from bus.security.record_rules import Order
from bus.security.whole_files import write_whole

log = structlog.get_logger()
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
