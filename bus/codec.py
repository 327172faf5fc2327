"""Encodes and decodes messages. Every byte that enters a process is checked here against its declaration.

A message on the wire is `[tag, schema_version, {field: value}]`. Arrays travel as raw little-endian bytes."""

import reprlib
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, make_dataclass
from functools import cache
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgpack
import numpy as np
from numpy.typing import NDArray

from bus.config import Json as Json
from bus.decoded_size import MemoryLimit, is_walked
from bus.errors import SchemaError

MAX_DEPTH = 64
"""Deepest nesting of a `Json` field; MessagePack itself writes at most 511 levels."""
MAX_ITEMS = 1 << 20
"""Largest number of elements of one list or dict. Arrays travel as bytes, so no message needs more."""


@dataclass(frozen=True)
class Dtype:
    """Marks a field as a one-dimensional array of this element type: raw little-endian bytes on the wire."""

    name: str


Int32Array = Annotated[NDArray[np.int32], Dtype("<i4")]
Float32Array = Annotated[NDArray[np.float32], Dtype("<f4")]
BoolArray = Annotated[NDArray[np.bool_], Dtype("|b1")]


class Message:
    """Base class of all messages. A subclass is a frozen dataclass with a `tag` and a `version`. A new field
    with a default needs no new version; a changed meaning or type does."""

    __slots__ = ()
    tag: ClassVar[str] = ""
    version: ClassVar[int] = 1
    memory: ClassVar[MemoryLimit] = MemoryLimit()
    """Limit on the memory of the values of one such message."""

    def __init_subclass__(
        cls, *, tag: str | None = None, version: int | None = None, memory: MemoryLimit | None = None
    ) -> None:
        """Keep the tag when `dataclass(slots=True)` builds the class a second time without it."""
        if tag is not None:
            cls.tag = tag
        if version is not None:
            cls.version = version
        if memory is not None:
            cls.memory = memory

    def check(self) -> None:
        """Raise `SchemaError` when the fields, each right by itself, do not fit together."""


M = TypeVar("M", bound=Message)
Convert = Callable[[Any], Any]
OTHER_BUILD = "other_build"
"""Kind of the `SchemaError` for a message that is whole, and of a build with which this one cannot talk."""
_SCALARS = frozenset((types.NoneType, bool, int, float, str))
_STRINGS = frozenset((str,))
_Field = tuple[str, Convert | None, Convert, Callable[[], Any] | None]
"""Name of a field, how it is packed (None: unchanged) and unpacked, and what makes its default. It is a plain
tuple because each trajectory has more than fourteen fields and unpacking a tuple is fastest."""


def encode(message: Message) -> bytes:
    """Encode a message as bytes for the wire or for disk. Raises `SchemaError` when a field holds what cannot
    travel, such as a set among the metadata."""
    try:
        return cast(bytes, msgpack.packb([message.tag, message.version, _body(message)], use_bin_type=True))
    except (TypeError, ValueError, OverflowError) as error:  # SchemaError is a ValueError
        raise SchemaError(f"cannot encode {message.tag}: {error}") from error


def decode(data: bytes, *expected: type[M]) -> M:
    """Decode the message in `data`, which must be one of `expected`. There is no registry of messages. Raises
    `SchemaError` for bytes that are not such a message: the reason names the field."""
    walked = is_walked(data, _memory_limit(data, expected))
    try:
        if not walked:
            _check_counts(data)
        content = msgpack.unpackb(data, raw=False, max_array_len=MAX_ITEMS, max_map_len=MAX_ITEMS)
    except (ValueError, msgpack.UnpackException) as error:
        raise SchemaError(f"{len(data)} bytes are not MessagePack: {error}") from error
    if not (isinstance(content, list) and len(content) == 3 and isinstance(content[2], dict)):
        raise SchemaError("not a message: expected [tag, version, fields]")
    tag, version, body = content
    for cls in expected:
        if tag == cls.tag:
            _check_version(cls, version)
            return _from_body(cls, body)
    raise SchemaError(
        f"unexpected message {reprlib.repr(tag)}: expected {' or '.join(c.tag for c in expected)}"
    )


def _memory_limit(data: bytes, expected: tuple[type[M], ...]) -> MemoryLimit:
    return next((cls.memory for cls in expected if data.startswith(_beginning(cls.tag))), MemoryLimit())


@cache
def _beginning(tag: str) -> bytes:
    """Return the first bytes of a message with this tag. A packer takes 256 KiB, so it is not made again."""
    return b"\x93" + bytes(msgpack.packb(tag))


def _check_counts(data: bytes) -> None:
    """Refuse oversized lists before they are built: msgpack allocates memory by the declared length alone. It
    takes a copy of `data`, so it serves short messages only."""
    walker = msgpack.Unpacker(max_buffer_size=max(1, len(data)))  # 0 would mean no limit
    walker.feed(data)
    walker.skip()


def _check_version(cls: type[Message], version: object) -> None:
    if type(version) is not int:
        raise SchemaError(f"{cls.tag}: schema version {reprlib.repr(version)} is not a number")
    if version > cls.version:
        reason = f"{cls.tag}: schema {version} is newer than this build's {cls.version}: upgrade it"
        raise SchemaError(reason, kind=OTHER_BUILD)
    if version < cls.version:
        reason = f"{cls.tag}: schema {version} is older than this build's {cls.version}: drop it"
        raise SchemaError(reason, kind=OTHER_BUILD)


def _body(message: Message) -> dict[str, Any]:
    body = {}
    for name, pack, _, _ in _fields_of(cast(Any, type(message))):
        value = getattr(message, name)
        body[name] = value if pack is None else pack(value)
    return body


def _from_body(cls: type[M], body: Any) -> M:
    if not isinstance(body, dict):
        raise SchemaError(f"{cls.tag}: expected fields, found {type(body).__name__}")
    values = []
    for name, _, unpack, default in _fields_of(cast(Any, cls)):
        if name in body:
            try:
                values.append(unpack(body[name]))
            except SchemaError as error:
                actor = error.actor or _maker(body)
                raise SchemaError(f"{cls.tag}.{name}: {error}", actor=actor) from error
        elif default is not None:
            values.append(default())
        else:
            raise SchemaError(f"{cls.tag}.{name}: missing", actor=_maker(body))
    message: M = fast_constructor(cast(Any, cls))(*values)
    try:
        message.check()
    except SchemaError as error:
        error.actor = _maker(body)
        raise
    return message


def _maker(body: dict[Any, Any]) -> str:
    actor = body.get("actor", "")
    return actor if isinstance(actor, str) else ""


@cache
def fast_constructor(cls: type[M], *names: str) -> Callable[..., M]:
    """Return what makes a message of its fields' values, given in the order of `names` (or as declared).

    It takes a fifth of the time of `__init__`, which sets each field of a frozen class by a call: a twin with
    the same slots that is not frozen is made, and its class then changed. No default is filled in."""
    order = names or tuple(field.name for field in fields(cast(Any, cls)))
    twin: Any = make_dataclass(cls.__name__, [(name, Any) for name in order], bases=cls.__bases__, slots=True)

    def make(*values: Any) -> M:
        made = twin(*values)
        made.__class__ = cls
        return cast(M, made)

    return make


@cache
def _fields_of(cls: Any) -> tuple[_Field, ...]:
    hints = get_type_hints(cls, include_extras=True)
    return tuple((f.name, *_converters(hints[f.name]), _default_of(f)) for f in fields(cls))


def _default_of(field: Any) -> Callable[[], Any] | None:
    if field.default is not MISSING:
        return lambda: field.default
    return None if field.default_factory is MISSING else cast(Callable[[], Any], field.default_factory)


def _converters(hint: Any) -> tuple[Convert | None, Convert]:
    origin = get_origin(hint)
    if origin is Annotated:
        return _array_converters(get_args(hint)[1])
    if origin is tuple:
        return _tuple_converters(get_args(hint)[0])
    if origin is Literal:
        return None, _one_of(get_args(hint))
    if origin in (dict, list, Mapping):
        return None, _json_of(list if origin is list else dict)
    if origin in (Union, types.UnionType):
        return _union_converters(get_args(hint))
    if isinstance(hint, type) and issubclass(hint, Message):
        return _body, lambda value: _from_body(hint, value)
    if isinstance(hint, type) and issubclass(hint, tuple):
        return None, _record_converter(hint)
    if hint is float:
        return None, _number
    if hint is int:
        return None, _integer
    return None, _exactly(hint)


def _array_converters(dtype: Dtype) -> tuple[Convert, Convert]:
    kind = np.dtype(dtype.name)
    itemsize, boolean = kind.itemsize, kind.kind == "b"

    def pack(array: NDArray[Any]) -> bytes:
        if array.dtype != kind or array.ndim != 1:
            raise SchemaError(f"array is {array.dtype}{list(array.shape)}, declared one-dimensional {kind}")
        return array.tobytes()

    def unpack(value: Any) -> NDArray[Any]:
        if type(value) is not bytes or len(value) % itemsize:
            raise SchemaError(f"not the bytes of a {kind} array")
        if boolean and value.translate(None, b"\x00\x01"):
            raise SchemaError("a boolean array holds other bytes than 0 and 1")
        return np.frombuffer(value, kind)

    return pack, unpack


def _tuple_converters(item: Any) -> tuple[Convert, Convert]:
    pack_item, unpack_item = _converters(item)
    to_list = _exactly(list)
    return (
        list if pack_item is None else lambda values: [pack_item(v) for v in values],
        lambda value: tuple(unpack_item(v) for v in to_list(value)),
    )


def _record_converter(kind: Any) -> Convert:
    """Return how a `NamedTuple` is unpacked. It travels as a list, without the names of its fields. Fields
    are only ever added at the end, with a default: a shorter list is older, a longer one newer."""
    hints = get_type_hints(kind, include_extras=True)
    unpacks = [(name, _converters(hints[name])[1]) for name in kind._fields]
    required = len(unpacks) - len(kind._field_defaults)
    to_list = _exactly(list)

    def unpack(value: Any) -> Any:
        items = to_list(value)
        if len(items) < required:
            raise SchemaError(
                f"a {kind.__name__.lower()} of {len(items)} fields, of which {required} are required"
            )
        try:
            return kind(*[convert(item) for (_, convert), item in zip(unpacks, items, strict=False)])
        except SchemaError as error:
            raise SchemaError(f"{kind.__name__.lower()} {reprlib.repr(items)}: {error}") from error

    return unpack


def _union_converters(options: tuple[Any, ...]) -> tuple[Convert | None, Convert]:
    if len(options) == 2 and types.NoneType in options:
        pack, unpack = _converters(next(o for o in options if o is not types.NoneType))
        packs = None if pack is None else lambda value: None if value is None else pack(value)
        return packs, lambda value: None if value is None else unpack(value)
    plain = tuple(get_origin(option) or option for option in options)
    return None, _json_of(*(p for p in plain if isinstance(p, type)))


def _exactly(*kinds: type) -> Convert:
    def check(value: Any) -> Any:
        if type(value) not in kinds:
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise SchemaError(f"expected {wanted}, found {type(value).__name__}")
        return value

    return check


def _json_of(*kinds: type) -> Convert:
    is_kind = _exactly(*kinds)

    def check(value: Any) -> Any:
        _check_json(is_kind(value), MAX_DEPTH)
        return value

    return check


def _check_json(value: Any, depth: int) -> None:
    """Refuse what MessagePack has and JSON has not: bytes, timestamps, extension types, keys of bytes."""
    if type(value) in _SCALARS:
        return
    if depth == 0:
        raise SchemaError(f"nested more than {MAX_DEPTH} deep")
    if type(value) not in (dict, list):
        raise SchemaError(f"expected JSON, found {type(value).__name__}")
    if type(value) is dict and not {*map(type, value)} <= _STRINGS:
        raise SchemaError("a key is not a string")
    for child in value.values() if type(value) is dict else value:
        if type(child) not in _SCALARS:  # the check here is cheaper than the call that it avoids
            _check_json(child, depth - 1)


def _one_of(choices: tuple[Any, ...]) -> Convert:
    def check(value: Any) -> Any:
        if value not in choices:
            raise SchemaError(f"expected one of {', '.join(map(repr, choices))}, found {reprlib.repr(value)}")
        return value

    return check


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise SchemaError(f"expected a number, found {type(value).__name__}")
    return float(value)


def _integer(value: Any) -> int:
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise SchemaError(f"expected an integer of 64 bits, found {reprlib.repr(value)}")
    return value
