"""Segments that go to S3, a real server of it: they come back, and whatever is wrong costs none."""

import asyncio
from contextlib import closing

import fsspec
import pytest
from structlog.testing import capture_logs

from bus.codec import encode
from bus.errors import ConfigError, StorageError
from storage.disk.run_directory import RunDirectory
from storage.settings.replay import ReplayConfig
from storage.shard.service import ShardsSettings, run_shards
from storage.store import retention
from storage.store.archive import check_archive, restore
from storage.store.replay import ReplayStore
from storage.store.retention import Retention, keep_house
from tests.factories import make_trajectory
from tests.storage.serving import LearnerStandIn, running, send_groups, serving, until

pytestmark = pytest.mark.slow

ARCHIVE = "s3://bucket/replay/test"


@pytest.fixture
def quick_housekeeping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "PERIOD_S", 0.05)


def group(lease_id: int):
    return [make_trajectory(lease_id, sample) for sample in range(2)]


def objects() -> list[str]:
    files = fsspec.filesystem("s3")
    files.invalidate_cache()
    return sorted(files.find("bucket"))


def test_segment_comes_back_from_a_bucket_bit_for_bit(object_store, tmp_path):
    directory = tmp_path / "shard_00"
    with closing(ReplayStore.open(directory)) as store:
        store.append(group(0))
        store.append(group(1))
        store.retire(store.entries[0], ARCHIVE)
        assert objects() == ["bucket/replay/test/shard_00/segment_00000000.zip"]  # and nothing in parts
        with pytest.raises(StorageError, match="restore its segment from the archive"):
            store.read([0])
    assert restore(directory, ARCHIVE) == ["segment_00000000"]
    with closing(ReplayStore.open(directory, writable=False)) as store:
        assert [encode(t) for t in store.read([0, 1])] == [encode(t) for t in (*group(0), *group(1))]


@pytest.mark.nats
@pytest.mark.usefixtures("quick", "quick_housekeeping")
async def test_nothing_is_removed_while_the_server_is_away_and_all_is_archived_when_it_is_back(
    object_store, bus, tmp_path
):
    learner, how = LearnerStandIn(bus), Retention(retain_bytes=0, archive=ARCHIVE)
    refusal = f"{ARCHIVE}/0/segment_00000000.zip cannot be written"
    async with serving(bus, tmp_path) as storage:
        store = storage.stores[0]
        await learner.publish(0)
        await until(lambda: storage.ledger.next_id == 4)
        await send_groups(bus, [0, 1])
        assert await learner.batch(1) == [0, 1]
        await learner.commit(1)
        object_store.kill()
        with capture_logs() as said:
            async with running(lambda stop: keep_house(bus, store, how, stop, shard=0)):
                await until(lambda: sum(refusal in entry.get("reason", "") for entry in said) >= 2)
                assert not store.entries[0].retired
                assert len(store.read([0])) == 2
                object_store.start()
                object_store.create_bucket("bucket")
                await until(lambda: store.entries[0].retired)
    assert restore(tmp_path / "0", ARCHIVE) == ["segment_00000000"]


@pytest.mark.parametrize("missing", ["bucket", "credentials"])
def test_archive_that_cannot_be_used_is_refused_at_the_start(object_store, monkeypatch, missing):
    if missing == "credentials":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    archive, reason = {
        "bucket": ("s3://mistyped/replay", "The specified bucket does not exist"),
        "credentials": (ARCHIVE, "Unable to locate credentials"),
    }[missing]
    with pytest.raises(ConfigError, match=rf"replay\.archive: {archive} cannot be written .*{reason}"):
        check_archive(archive)
    assert fsspec.filesystem("s3", key="test", secret="test").ls("") == ["bucket"]  # none was made


def test_archive_that_can_be_used_is_left_as_it_was(object_store, tmp_path):
    check_archive(ARCHIVE)
    assert objects() == []
    check_archive(str(tmp_path / "archive"))
    assert list((tmp_path / "archive").iterdir()) == []


def test_archive_that_is_away_at_the_start_is_warned_of(object_store):
    object_store.kill()
    with capture_logs() as said:
        check_archive(ARCHIVE)
    assert [entry["event"] for entry in said] == ["archive_does_not_answer"]


def test_archive_in_the_way_of_a_file_or_of_no_known_kind_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for archive in (str(tmp_path / "file"), "nonsense://bucket"):
        with pytest.raises(ConfigError, match=f"{archive} cannot be written"):
            check_archive(archive)


@pytest.mark.nats
async def test_shards_do_not_start_with_an_archive_that_cannot_be_used(object_store, bus, tmp_path):
    replay = ReplayConfig(shards=2, archive="s3://mistyped")
    with pytest.raises(ConfigError, match="s3://mistyped/test cannot be written"):
        await run_shards(bus, ShardsSettings((0,), replay, RunDirectory(tmp_path, "test")), asyncio.Event())
