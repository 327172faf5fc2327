"""Compares the bytes of a blob with the reference to it, by whatever way they came."""

from typing import TypeVar

import xxhash

from bus.errors import DamagedError
from bus.messages import BlobRef

B = TypeVar("B", bytes, memoryview)


def checked(ref: BlobRef, data: B) -> B:
    """Return `data` if it is what `ref` stands for, however it came. Raises `DamagedError` otherwise."""
    if len(data) != ref.size_bytes or xxhash.xxh3_128_hexdigest(data) != ref.digest:
        raise DamagedError(f"{ref.subject}: {len(data)} bytes do not have the digest {ref.digest}")
    return data
