"""Digest of what a trajectory says: who sampled it, who stores it and who trains on it compare theirs."""

from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, get_args, get_type_hints

import msgpack
import xxhash

from bus.codec import Dtype
from bus.trajectory import Trajectory

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
    """How the fields of a trajectory are read."""

    arrays: Callable[[Trajectory], tuple[Any, ...]]
    others: Callable[[Trajectory], tuple[Any, ...]]
    names: tuple[str, ...]
    """Names of the others."""
    defaults: tuple[Any, ...]
    """Their values that add nothing to the digest."""


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
    """How a `NamedTuple` counts."""

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
