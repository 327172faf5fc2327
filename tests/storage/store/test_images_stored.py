"""Images in segments: each once, whoever shows it, and read back with every trajectory that does."""

import zipfile
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from bus.codec import encode
from bus.errors import LostDataError, SchemaError
from bus.images import PlacedImage, image_digest
from bus.requests import GroupRef
from bus.streams.publish import Publisher
from bus.trajectory import Trajectory, TrajectoryBatch
from storage.client.reader import ReplayReader
from storage.store import segments
from storage.store.replay import ReplayStore
from storage.store.segments import FILE, RECORD_FIELDS, Segment, merge_segments, write_segment
from tests.factories import make_trajectory
from tests.storage.serving import make_shard, running, until

PICTURE, OTHER = bytes(range(256)) * 8, bytes(reversed(range(256))) * 8


def showing(lease_id: int, sample: int, *pictures: bytes) -> Trajectory:
    images = (PlacedImage(image_digest(data), 2 * n, 1, 2, data) for n, data in enumerate(pictures))
    return replace(make_trajectory(lease_id, sample, tokens=12), images=tuple(images))


def changed(segment, before: bytes, after: bytes) -> None:
    file = segment / FILE
    content = file.read_bytes()
    assert content.count(before) == 1
    file.write_bytes(content.replace(before, after))


def test_a_segment_holds_each_image_once_and_gives_it_to_all_that_show_it(tmp_path):
    written = [showing(0, 0, PICTURE), showing(0, 1, PICTURE, OTHER), make_trajectory(1, 0)]
    write_segment(tmp_path / "a", written)
    content = (tmp_path / "a" / FILE).read_bytes()
    assert content.count(PICTURE) == content.count(OTHER) == 1
    with closing(Segment(tmp_path / "a")) as segment:
        assert [encode(segment.trajectory(row)) for row in range(3)] == [encode(one) for one in written]


def test_merged_segments_keep_their_images_once(tmp_path):
    written = [showing(0, 0, PICTURE), make_trajectory(0, 1), showing(1, 0, OTHER, PICTURE)]
    for name, one in zip("abc", written, strict=True):
        write_segment(tmp_path / name, [one])
    merge_segments(tmp_path / "merged", [tmp_path / name for name in "abc"])
    with closing(Segment(tmp_path / "merged")) as segment:
        assert len(list(segment.images)) == 2
        assert [encode(segment.trajectory(row)) for row in range(3)] == [encode(one) for one in written]


def test_a_segment_from_before_images_is_read_and_merged_with_one_that_has_them(tmp_path, monkeypatch):
    old, new = make_trajectory(0), showing(1, 0, PICTURE)
    with monkeypatch.context() as older:
        older.setattr(segments, "RECORD_FIELDS", RECORD_FIELDS[: RECORD_FIELDS.index("images")])
        write_segment(tmp_path / "old", [old])
    write_segment(tmp_path / "new", [new])
    merge_segments(tmp_path / "both", [tmp_path / "old", tmp_path / "new"])
    with closing(Segment(tmp_path / "both")) as both:
        assert [encode(both.trajectory(row)) for row in range(2)] == [encode(old), encode(new)]


def test_an_image_that_changed_on_the_disk_is_named(tmp_path):
    write_segment(tmp_path / "a", [showing(0, 0, PICTURE)])
    changed(tmp_path / "a", PICTURE, OTHER)
    with (
        closing(Segment(tmp_path / "a")) as segment,
        pytest.raises(LostDataError, match=f"image {image_digest(PICTURE)} does not match its digest"),
    ):
        segment.trajectory(0)


def test_segments_with_an_image_that_changed_are_merged_and_only_who_shows_it_is_lost(tmp_path):
    for n, name in enumerate("abc"):
        write_segment(tmp_path / name, [showing(n, 0, OTHER if n == 0 else PICTURE)])
    changed(tmp_path / "a", OTHER, OTHER[:-1] + b"?")
    changed(tmp_path / "b", PICTURE, PICTURE[:-1] + b"?")  # c has it whole
    merge_segments(tmp_path / "merged", [tmp_path / name for name in "abc"])
    with closing(Segment(tmp_path / "merged")) as segment:
        with pytest.raises(LostDataError, match=f"image {image_digest(OTHER)} does not match its digest"):
            segment.trajectory(0)
        assert [segment.trajectory(row).images[0].data for row in (1, 2)] == [PICTURE, PICTURE]


def test_a_compressed_image_that_changed_on_the_disk_is_named_however_it_is_noticed(tmp_path):
    picture = np.random.default_rng(0).integers(0, 4, 100_000, dtype=np.uint8).tobytes()
    write_segment(tmp_path / "a", [showing(0, 0, picture)])
    merge_segments(tmp_path / "merged", [tmp_path / "a"])
    file = tmp_path / "merged" / FILE
    content = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        entry = archive.getinfo("images/c/0")
    for at in range(entry.header_offset + 100, entry.header_offset + entry.file_size, 4000):
        file.write_bytes(content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :])
        with (
            closing(Segment(tmp_path / "merged")) as segment,
            pytest.raises(LostDataError, match=f"merged is corrupt: image {image_digest(picture)}"),
        ):
            segment.trajectory(0)


def test_an_image_without_its_bytes_is_not_stored(tmp_path):
    one = showing(0, 0, PICTURE)
    with pytest.raises(SchemaError, match="its bytes are not in the message"):
        write_segment(tmp_path / "a", [replace(one, images=(one.images[0]._replace(data=b""),))])


def test_trajectories_that_are_read_together_share_the_bytes_of_an_image(tmp_path):
    with closing(ReplayStore.open(tmp_path / "replay")) as store:
        store.append([showing(0, 0, PICTURE), showing(0, 1, OTHER, PICTURE)])
        first, second = store.read([0])
    assert first.images[0].data is second.images[1].data


@pytest.mark.nats
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("read", ["auto", "bus"])
async def test_the_learner_reads_siblings_with_the_image_that_travelled_once(bus, tmp_path, read):
    siblings = [showing(0, sample, PICTURE) for sample in range(2)]
    with closing(ReplayStore.open(tmp_path / "replay")) as store:
        async with running(make_shard(bus, store, 0).run):
            data = encode(TrajectoryBatch.of(siblings))
            await Publisher(bus).publish(bus.subject("trajectories", 0), data, message_id="group")
            await until(lambda: store.completed == [0])
            with closing(ReplayReader(bus, "a", read=read)) as reader:
                [found] = await reader.fetch((GroupRef(lease_id=0, shard=0),))
    assert [encode(one) for one in found] == [encode(one) for one in siblings]
    assert found[0].images[0].data is found[1].images[0].data
