"""Parts of a blob, each with a digest of its own, so that many hosts can pass them on and a fetch goes on by
part.

A part is one or more blocks. Its digest is that of its block, or of its blocks' digests: a writer that does
not know the size of the blob yet takes the digests of blocks."""

from collections.abc import Iterator
from concurrent.futures import Executor, Future

from bus.blobs import blocks_of, sha256_of
from bus.errors import BusError
from bus.messages import PART_DIGEST_BYTES, BlobRef
from bus.weight_requests import MOST_PARTS
from storage.disk.atomic_files import Content, Data

BLOCK_BYTES = 8 << 20
AHEAD = 64
"""Blocks that may wait for their digest: content may be copies, which are freed then."""


class BlockDigests:
    """Takes the digests of the blocks of content that passes by, on threads."""

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._size_bytes = 0
        self._blocks: list[Future[bytes]] = []

    def passing(self, content: Content) -> Iterator[Data]:
        """Yield the content. Its memory has to stay as it is until `ref` has returned."""
        for block in blocks_of(content, BLOCK_BYTES):
            self._size_bytes += sum(map(len, block))
            self._blocks.append(self._threads.submit(sha256_of, block))
            if len(self._blocks) > AHEAD:
                self._blocks[-AHEAD].result()
            yield from block

    def ref(self, subject: str, origin: str) -> BlobRef:
        """Return a reference to what passed by; `subject` gets the beginning of the digest as last token."""
        blocks = [block.result() for block in self._blocks]
        a_part = 1
        while -(-len(blocks) // a_part) > MOST_PARTS:
            a_part *= 2
        parts = b"".join(_joined(blocks[n : n + a_part]) for n in range(0, len(blocks), a_part))
        digest = sha256_of([parts]).hex()
        return BlobRef(
            subject=f"{subject}.{digest[:12]}", chunks=1, size_bytes=self._size_bytes, digest=digest,
            origin=origin, part_bytes=a_part * BLOCK_BYTES, part_sha256=parts,
        )  # fmt: skip


def parts_of(ref: BlobRef) -> range:
    """Return the numbers of all parts. Raises `BusError` where no digests say what they are."""
    if ref.size_bytes and not ref.parts:
        raise BusError(f"{ref.subject} was announced without SHA-256 digests, by a build before this one")
    return range(ref.parts)


def part_range(ref: BlobRef, part: int) -> tuple[int, int]:
    """Return the first byte of a part and the one behind its last."""
    begin = part * ref.part_bytes
    return begin, min(begin + ref.part_bytes, ref.size_bytes)


def is_part(ref: BlobRef, part: int, data: Data) -> bool:
    """Tell whether these bytes are the part."""
    digest = _joined([sha256_of(block) for block in blocks_of([data], BLOCK_BYTES)])
    return digest == ref.part_sha256[part * PART_DIGEST_BYTES : (part + 1) * PART_DIGEST_BYTES]


def _joined(blocks: list[bytes]) -> bytes:
    return blocks[0] if len(blocks) == 1 else sha256_of(blocks)
