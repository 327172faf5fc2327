"""Positions in time, height and width of the tokens of a sequence with images (arXiv:2409.12191, 2.1)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bus.images import PlacedImage


def rope_positions(length: int, images: Sequence[PlacedImage]) -> NDArray[np.int64]:
    """Return the positions of `length` tokens, [3, length]: three equal ones for text.

    The tokens of an image have one time, and their row and column counted from it. What follows is one
    further than the largest of them."""
    positions = np.empty((3, length), np.int64)
    token = position = 0
    for image in images:
        text = image.start - token
        positions[:, token : image.start] = np.arange(position, position + text)
        position += text
        rows, columns = np.indices((image.rows, image.columns)).reshape(2, -1)
        positions[:, image.start : image.stop] = position + np.stack((np.zeros_like(rows), rows, columns))
        position += max(image.rows, image.columns)
        token = image.stop
    positions[:, token:] = np.arange(position, position + length - token)
    return positions


def rope_delta(images: Sequence[PlacedImage]) -> int:
    """Return the position of a token behind these images less its number in the sequence."""
    return sum(max(image.rows, image.columns) - image.rows * image.columns for image in images)
