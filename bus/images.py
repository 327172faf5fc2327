"""Images in a trajectory: which tokens stand for them, and their encoded bytes, named by their digest."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from bus.errors import SchemaError


class PlacedImage(NamedTuple):
    """An image, and the tokens [start, start + rows * columns) that stand for it, row by row."""

    digest: str
    """Name of the image: the xxh3-128 of its encoded bytes, hexadecimal."""
    start: int
    """First token that stands for the image."""
    rows: int
    """Rows of tokens: a token stands for a square of merged patches."""
    columns: int
    data: bytes = b""
    """The encoded bytes, PNG or JPEG; empty where another trajectory of the same message has them."""

    @property
    def stop(self) -> int:
        """Return the token behind the last one of the image."""
        return self.start + self.rows * self.columns

    def moved(self, tokens: int) -> "PlacedImage":
        """Return the same image so many tokens further on."""
        return self._replace(start=self.start + tokens)


class ImageCount(NamedTuple):
    """Counts the different images of some trajectories."""

    images: int
    tokens: int
    """Tokens that stand for images, for each image once."""

    @classmethod
    def of(cls, shown: Iterable[PlacedImage]) -> "ImageCount":
        """Count images, of which the same may come several times."""
        tokens = {image.digest: image.rows * image.columns for image in shown}
        return cls(len(tokens), sum(tokens.values()))


NO_IMAGES = ImageCount(0, 0)


def image_digest(data: bytes) -> str:
    """Return the name of an image by its encoded bytes."""
    return xxhash.xxh3_128_hexdigest(data)


def shown_tokens(length: int, images: Sequence[PlacedImage]) -> NDArray[np.bool_]:
    """Tell of each of `length` tokens whether it stands for one of these images."""
    shown = np.zeros(length, bool)
    for image in images:
        shown[image.start : image.stop] = True
    return shown


def check_images(name: str, images: Sequence[PlacedImage], mask: NDArray[np.bool_]) -> None:
    """Raise `SchemaError` for images that do not lie one after another among the tokens and outside of their
    `mask`, or whose bytes are not what they are called."""
    end, length = 0, len(mask)
    for image in images:
        if min(image.rows, image.columns) < 1 or not end <= image.start < image.stop <= length:
            raise SchemaError(
                f"{name}: an image of {image.rows} x {image.columns} tokens does not lie between token {end} "
                f"and the end, {length}"
            )
        if mask[image.start : image.stop].any():
            raise SchemaError(f"{name}: the mask holds tokens that stand for an image, which are not sampled")
        if image.data and image_digest(image.data) != image.digest:
            raise SchemaError(f"{name}: the bytes of image {image.digest} are those of another")
        end = image.stop


def check_all_given(found: Sequence[Sequence[PlacedImage]]) -> None:
    """Raise `SchemaError` for an image whose bytes none of these trajectories has."""
    images = [image for each in found for image in each]
    if lacking := {image.digest for image in images} - {image.digest for image in images if image.data}:
        raise SchemaError(f"image {min(lacking)} is named and its bytes are not in the message")


def given_once(found: Sequence[Sequence[PlacedImage]]) -> list[tuple[PlacedImage, ...]]:
    """Return the images of trajectories with the bytes of each where it comes first, and nowhere else."""
    seen: set[str] = set()

    def once(image: PlacedImage) -> PlacedImage:
        if image.digest in seen:
            return image._replace(data=b"")
        seen.add(image.digest)
        return image

    return [tuple(map(once, images)) for images in found]


def given_everywhere(found: Sequence[Sequence[PlacedImage]]) -> list[tuple[PlacedImage, ...]]:
    """Return the images of trajectories, each with its bytes, which one of them has."""
    data = {image.digest: image.data for images in found for image in images if image.data}
    return [tuple(image._replace(data=data[image.digest]) for image in images) for images in found]


ChangeImages = Callable[[Sequence[Sequence[PlacedImage]]], list[tuple[PlacedImage, ...]]]
"""How the images of trajectories become others."""
