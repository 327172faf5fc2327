"""Digest of what a trajectory says: who sampled it, who stores it and who trains on it compare theirs."""

from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, NamedTuple, get_type_hints

import msgpack
import numpy as np
import xxhash

from bus.trajectory import Trajectory

DIGEST_BYTES = 16
APART = frozenset({"reward", "reward_source", "reward_due"})
"""Fields outside the digest: a reward may be given after its trajectory was stored."""
_pack: Callable[[Any], bytes] = msgpack.packb


class _Field(NamedTuple):
    name: str
    default: Any
    """The value that adds nothing to the digest."""


def content_digest(trajectory: Trajectory) -> bytes:
    """Return the xxh3-128 of a trajectory without its reward: 16 bytes, the same in every process.

    It covers each field by name, but for those that have their default: so a field that a later build adds
    leaves the digests of earlier trajectories as they are. Images count by their own digests. Arrays count
    by dtype and bytes, lists by their length."""
    digest = xxhash.xxh3_128()
    plain: list[Any] = []
    for name, default in _declared():
        value = getattr(trajectory, name)
        if isinstance(value, np.ndarray):
            plain.append([name, value.dtype.str, len(value)])
            digest.update(np.ascontiguousarray(value).data)
        elif value is not default and value != default:
            plain.append([name, _plain(value)])
    digest.update(_pack(plain))
    return digest.digest()


@cache
def _declared() -> tuple[_Field, ...]:
    return tuple(
        _Field(one.name, one.default_factory() if one.default_factory is not MISSING else one.default)
        for one in fields(Trajectory)
        if one.name not in APART
    )


def _plain(value: Any) -> Any:
    """Return a value as lists and scalars; a `NamedTuple` without trailing defaults and bytes of images."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _plain_record(value)
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return value


def _plain_record(record: Any) -> list[Any]:
    defaults, numbers = record._field_defaults, _floats(record.__class__)
    found = [
        float(value) if name in numbers and value is not None else value
        for name, value in zip(record._fields, record, strict=True)
        if name != "data"
    ]
    names = [name for name in record._fields if name != "data"]
    while names and names[-1] in defaults and found[-1] == defaults[names[-1]]:
        del names[-1], found[-1]
    return found


@cache
def _floats(kind: Any) -> frozenset[str]:
    """Return the fields that are numbers with a fraction: decoding makes an integer there a float."""
    hints = get_type_hints(kind)
    return frozenset(name for name, hint in hints.items() if hint in (float, float | None))
