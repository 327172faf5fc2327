"""Parts of a blob, each with a digest of its own, so that many hosts can pass them on and a fetch goes on by
part.

A part is one or more blocks. Its digest is that of its block, or of its blocks' digests: a writer that does
not know the size of the blob yet takes the digests of blocks."""

from collections.abc import Iterator

import xxhash

from bus.messages import PART_DIGEST_BYTES, BlobRef
from bus.weight_requests import MOST_PARTS
from storage.disk.atomic_files import Content, Data

BLOCK_BYTES = 8 << 20


class BlockDigests:
    """Digests of the blocks of content that passes by."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._whole, self._block = xxhash.xxh3_128(), xxhash.xxh3_128()
        self._blocks: list[bytes] = []

    def passing(self, content: Content) -> Iterator[Data]:
        """Yield the pieces of `content`."""
        for piece in content:
            self._whole.update(piece)
            view = memoryview(piece).cast("B")
            while len(view):
                part = view[: BLOCK_BYTES - self.size_bytes % BLOCK_BYTES]
                self._block.update(part)
                self.size_bytes += len(part)
                if self.size_bytes % BLOCK_BYTES == 0:
                    self._end_block()
                view = view[len(part) :]
            yield piece

    def ref(self, subject: str, origin: str) -> BlobRef:
        """Return a reference to what passed by; `subject` gets the beginning of the digest as last token."""
        if self.size_bytes % BLOCK_BYTES:
            self._end_block()
        blocks, digest = len(self._blocks), self._whole.hexdigest()
        a_part = 1
        while -(-blocks // a_part) > MOST_PARTS:
            a_part *= 2
        parts = [_joined(self._blocks[n : n + a_part]) for n in range(0, blocks, a_part)]
        return BlobRef(
            subject=f"{subject}.{digest[:12]}", chunks=1, size_bytes=self.size_bytes, digest=digest,
            origin=origin, part_bytes=a_part * BLOCK_BYTES, part_digests=b"".join(parts),
        )  # fmt: skip

    def _end_block(self) -> None:
        self._blocks.append(self._block.digest())
        self._block.reset()


def part_range(ref: BlobRef, part: int) -> tuple[int, int]:
    """Return the first byte of a part and the one behind its last."""
    begin = part * ref.part_bytes
    return begin, min(begin + ref.part_bytes, ref.size_bytes)


def is_part(ref: BlobRef, part: int, data: Data) -> bool:
    """Tell whether these bytes are the part."""
    blocks = (data[begin : begin + BLOCK_BYTES] for begin in range(0, len(data), BLOCK_BYTES))
    digest = _joined([xxhash.xxh3_128_digest(block) for block in blocks])
    return digest == ref.part_digests[part * PART_DIGEST_BYTES : (part + 1) * PART_DIGEST_BYTES]


def _joined(blocks: list[bytes]) -> bytes:
    return blocks[0] if len(blocks) == 1 else xxhash.xxh3_128_digest(b"".join(blocks))
