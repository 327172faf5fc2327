"""Images of trajectories on the wire: once a message, and nothing that does not fit is let in."""

from dataclasses import replace

import pytest

from bus.codec import decode, encode
from bus.errors import SchemaError
from bus.images import PlacedImage, image_digest
from bus.trajectory import Trajectory, TrajectoryBatch
from tests.factories import make_trajectory

PICTURE, OTHER = b"\x89PNG one picture" * 40, b"\x89PNG another" * 40


def placed(data: bytes, start: int, rows: int = 1, columns: int = 2) -> PlacedImage:
    return PlacedImage(image_digest(data), start, rows, columns, data)


def showing(*images: PlacedImage, sample: int = 0) -> Trajectory:
    return replace(make_trajectory(0, sample, group_size=3, tokens=12), images=images)


def test_siblings_share_the_bytes_of_an_image_on_the_wire():
    siblings = [showing(placed(PICTURE, 0), sample=n) for n in range(3)]
    siblings[2] = showing(placed(PICTURE, 0), placed(OTHER, 3), sample=2)
    data = encode(TrajectoryBatch.of(siblings))
    assert data.count(PICTURE) == data.count(OTHER) == 1
    found = decode(data, TrajectoryBatch).whole
    assert [encode(one) for one in found] == [encode(one) for one in siblings]


def test_a_batch_that_names_an_image_without_its_bytes_is_refused():
    without = showing(placed(PICTURE, 0)._replace(data=b""))
    with pytest.raises(SchemaError, match="its bytes are not in the message"):
        decode(encode(TrajectoryBatch(trajectories=(without,))), TrajectoryBatch)


@pytest.mark.parametrize(
    ("image", "complaint"),
    [
        (placed(PICTURE, 4, columns=3), "the mask holds tokens that stand for an image"),
        (placed(PICTURE, 11), "does not lie between token 0 and the end, 12"),
        (placed(PICTURE, -1), "does not lie between"),
        (placed(PICTURE, 0, rows=0), "an image of 0 x 2 tokens"),
        (placed(PICTURE, 0)._replace(digest=image_digest(OTHER)), "are those of another"),
    ],
)
def test_an_image_that_does_not_fit_its_trajectory_is_refused(image, complaint):
    with pytest.raises(SchemaError, match=complaint):
        decode(encode(showing(image)), Trajectory)


def test_images_that_overlap_are_refused():
    with pytest.raises(SchemaError, match="does not lie between token 2"):
        decode(encode(showing(placed(PICTURE, 0), placed(OTHER, 1))), Trajectory)
