"""The images of a segment: the encoded bytes of each, once, however many trajectories show it.

`images` [bytes] holds one after the other, and `image_rows` [n, 3] the two halves of each one's digest and
where it ends. A segment whose trajectories have no images has neither."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bus.errors import LostDataError
from bus.images import PlacedImage, check_all_given, image_digest
from bus.trajectory import Trajectory
from storage.store.segment_arrays import CompressedArray

IMAGE_ARRAYS = {"images": "uint8", "image_rows": "int64"}
"""Names and zarr data types of the arrays."""
KnownImages = dict[str, bytes]
"""Bytes of images that were read, by digest: trajectories that are read together share them."""
_NO_BYTES = np.empty(0, np.uint8)
_NO_ROWS = np.empty((0, 3), np.int64)


class ImageBlobs:
    """The images of one segment by digest, read when they are asked for."""

    def __init__(
        self,
        segment: Path,
        data: NDArray[np.uint8] | CompressedArray = _NO_BYTES,
        table: NDArray[np.int64] = _NO_ROWS,
    ) -> None:
        self._segment = segment
        self._data = data
        begins = [0, *table[:-1, 2].tolist()]
        self._spans = {
            bytes(row[:2].tobytes()).hex(): (begin, int(row[2]))
            for begin, row in zip(begins, table, strict=False)
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._spans)

    def stored(self, digest: str) -> bytes:
        """Return what lies here as the bytes of an image, which may have changed on the disk. Raises
        `LostDataError` where it cannot be decompressed."""
        begin, end = self._spans.get(digest, (0, 0))
        try:
            data: bytes = self._data[begin:end].tobytes()
        except RuntimeError as error:  # what zarr's codecs raise
            raise LostDataError(self._changed(digest)) from error
        return data

    def bytes_of(self, digest: str) -> bytes:
        """Return the bytes of an image. Raises `LostDataError` where they are missing or changed."""
        data = self.stored(digest)
        if image_digest(data) != digest:
            raise LostDataError(self._changed(digest))
        return data

    def placed(self, images: Sequence[Sequence[Any]], known: KnownImages) -> tuple[PlacedImage, ...]:
        """Return the images of a record with their bytes; raises as `bytes_of`. Bytes of `known` images are
        not read again, and those that are read become known."""
        placed = [PlacedImage(*image) for image in images]
        for digest in {image.digest for image in placed} - known.keys():
            known[digest] = self.bytes_of(digest)
        return tuple(image._replace(data=known[image.digest]) for image in placed)

    def _changed(self, digest: str) -> str:
        return (
            f"{self._segment} is corrupt: image {digest} does not match its digest; restore it or move the "
            "store away"
        )


def blobs_of(trajectories: Sequence[Trajectory]) -> Mapping[str, NDArray[Any]]:
    """Return the arrays of the images of these trajectories; none where they have no images. Raises
    `SchemaError` for an image without its bytes."""
    check_all_given([one.images for one in trajectories])
    images = (image for one in trajectories for image in one.images)
    return _arrays({image.digest: image.data for image in images if image.data})


def joined_blobs(segments: Sequence[ImageBlobs]) -> Mapping[str, NDArray[Any]]:
    """Return the arrays of the images of several segments, each image once.

    One that changed on the disk is taken from another segment that has it whole. Where none has, it stays as
    it is, like all else that is merged: whoever reads it is told, and the store is tidied meanwhile."""
    found: dict[str, bytes] = {}
    for blobs in segments:
        for digest in blobs:
            if digest not in found or image_digest(found[digest]) != digest:
                found[digest] = blobs.stored(digest)
    return _arrays(found)


def _arrays(images: Mapping[str, bytes]) -> Mapping[str, NDArray[Any]]:
    if not images:
        return {}
    table = np.empty((len(images), 3), np.int64)
    table[:, :2] = np.frombuffer(bytes.fromhex("".join(images)), np.int64).reshape(-1, 2)
    table[:, 2] = np.cumsum([len(data) for data in images.values()])
    return {"images": np.frombuffer(b"".join(images.values()), np.uint8), "image_rows": table}
