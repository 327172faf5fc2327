"""Adds up how much memory a message will take, from its bytes, before anything is built of them.

An empty map is one byte on the wire and 80 in memory, so the size of a message alone bounds nothing. The
types of its fields do not either: a field of JSON may hold anything. So the values are walked as they lie in
the bytes, nothing is made of them, and the walk ends at the value with which the message takes too much."""

from dataclasses import dataclass

from bus.errors import SchemaError

FREE_BYTES = 8 << 20
"""Memory that the values of any message may take, however short it is."""
DENSEST = 100
"""Memory of a value per byte of it: no value of MessagePack takes more than an empty list or map does."""
_LARGEST_FREE = FREE_BYTES // DENSEST


@dataclass(frozen=True)
class MemoryLimit:
    """Limit on the memory of a message's values. The content of texts and bytes is counted once, as it is."""

    expansion: int = 12
    """Bytes of memory per byte of the message, above `FREE_BYTES`. Turns of a trajectory take 8 of them;
    texts and arrays, which most of a large message is, take 1."""
    most_bytes: int = 256 << 20
    """Largest memory, however long the message is, its bytes apart."""

    def allowed(self, size_bytes: int) -> int:
        """Return the memory that the values of a message of `size_bytes` may take."""
        return min(FREE_BYTES + self.expansion * size_bytes, self.most_bytes)


_REFERENCE = 9
"""Memory that a value takes in the list that has it, which may have room for an eighth more than it holds."""
_NUMBER = 32 + _REFERENCE
_TEXT = 64 + _REFERENCE
_BYTES = 40 + _REFERENCE
_LIST = 72 + _REFERENCE
_MAP = 80 + _REFERENCE
_FILLED_MAP = 120
_SMALL_MAP = 5
"""Entries that the first table of a map has room for."""
_ENTRY = 64
"""Memory of one more entry, beside its key and its value."""


def _scalars() -> dict[int, tuple[int, int]]:
    """Return size on the wire and memory of the values whose first byte says both."""
    alone = [*range(0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3]  # small integers, None, False, True
    found = dict.fromkeys(alone, (1, _REFERENCE))
    for size, firsts in (
        (2, (0xCC, 0xD0)),
        (3, (0xCD, 0xD1)),
        (5, (0xCE, 0xD2, 0xCA)),
        (9, (0xCF, 0xD3, 0xCB)),
    ):
        found |= dict.fromkeys(firsts, (size, _NUMBER))
    return found | {0xA0 + size: (1 + size, _TEXT + size) for size in range(32)}


_SCALAR = [_scalars().get(first) for first in range(256)]
_LENGTH_BYTES = {0xD9: 1, 0xDA: 2, 0xDB: 4, 0xC4: 1, 0xC5: 2, 0xC6: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
"""Bytes of the length that follows the first byte of a text, bytes, list or map."""


def is_walked(data: bytes, limit: MemoryLimit) -> bool:
    """Walk the values of a message, and return whether it was long enough to need that.

    Lists and maps of a walked message declare no more values than follow. Raises `SchemaError` for one whose
    values would take too much memory, that is not whole, or that has an extension type."""
    if len(data) <= _LARGEST_FREE:
        return False
    allowed = limit.allowed(len(data))
    if _built_bytes(data, allowed) > allowed:
        raise SchemaError(
            f"the values of this message of {len(data)} bytes would take more than {allowed} bytes "
            "of memory: it has too many of them"
        )
    return True


def _built_bytes(data: bytes, allowed: int) -> int:
    """Return the memory of the values in `data`, beside the content of texts and bytes. Once it is above
    `allowed` what remains is not looked at."""
    place, missing, built = 0, 1, 0
    try:
        while missing and built <= allowed:
            scalar = _SCALAR[data[place]]
            if scalar is not None:
                place += scalar[0]
                built += scalar[1]
                missing -= 1
                continue
            after, children, memory = _compound(data, place)
            place = after
            built += memory
            missing += children - 1
            if place + missing > len(data):  # each value that is still to come takes a byte
                raise SchemaError(f"{len(data)} bytes are not MessagePack: they end before their last value")
    except IndexError as error:
        raise SchemaError(f"{len(data)} bytes are not MessagePack: they end within a value") from error
    return built


def _compound(data: bytes, place: int) -> tuple[int, int, int]:
    """Return where a text, bytes, list or map ends or has its first child, its children and own memory."""
    first = data[place]
    if 0x80 <= first < 0xA0:
        length, begin = first & 15, place + 1
        is_map = first < 0x90
    elif first in _LENGTH_BYTES:
        begin = place + 1 + _LENGTH_BYTES[first]
        length = int.from_bytes(data[place + 1 : begin], "big")
        is_map = first in (0xDE, 0xDF)
    else:
        raise SchemaError(f"it holds a value of type 0x{first:02x}, which no message has")
    if first in (0xD9, 0xDA, 0xDB):
        return begin + length, 0, _TEXT
    if first in (0xC4, 0xC5, 0xC6):
        return begin + length, 0, _BYTES
    if is_map:
        table = _FILLED_MAP + _ENTRY * max(0, length - _SMALL_MAP) if length else 0
        return begin, 2 * length, _MAP + table
    return begin, length, _LIST
