"""Snapshots are written beside: neither steps nor later versions wait for a slow disk."""

import asyncio
import random
import sys
import time
from functools import partial

import numpy as np
import pytest
from structlog.testing import capture_logs

from actors.weights.received import Receiver
from bus.errors import BusError, StorageError
from bus.messages import AdaptedBase, PolicyManifest, SnapshotWanted
from learner.config.publication import PublicationConfig
from learner.publication import publisher as publication
from learner.publication import snapshot_writer
from learner.publication.announcement import AdapterBase
from learner.publication.kept_versions import KeptVersions, put_kept
from learner.publication.publisher import WeightPublisher
from learner.publication.snapshot_writer import HeldContent
from storage.weights.blob_sources import Blobs
from storage.weights.tensors import HostTensor, Weights, snapshot_content
from tests.learner.publication.slow_disk import TIMEOUT_S, SlowDisk

WORDS = 400_000


class Host:
    """Two sets of memory that take turns, as the learner's."""

    def __init__(self):
        self._sets = [{"a": HostTensor("U16", (WORDS,), np.zeros(WORDS, np.uint16))} for _ in range(2)]

    def take(self, version):
        tensors = self._sets[version % 2]
        tensors["a"].words[:] = words_at(version)
        return tensors


def words_at(version):
    words = np.arange(WORDS, dtype=np.uint16)
    words[: version * 100] += 7
    return words


@pytest.fixture
async def disk(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot_writer, "PIECE_BYTES", 100_000)
    disk = SlowDisk(tmp_path / "shared")
    yield disk
    disk.goes_on.set()


@pytest.fixture
async def publisher(bus, disk, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    config = PublicationConfig(keep=3, snapshot_every=2, keep_versions=(3,))
    publisher = WeightPublisher(bus, disk, config, incarnation="one", kept=tmp_path / "kept")
    await publisher.start(tmp_path)
    yield publisher
    await publisher.close()


async def publish(publisher, host, version):
    return await publisher.publish(host.take(version), policy_version=version, stage="rl", trains_from=0)


async def assert_arrives(bus, manifest):
    weights = await Receiver(Blobs(bus)).advance(manifest)
    assert weights.policy_version == manifest.policy_version
    np.testing.assert_array_equal(weights.tensors["a"].words, words_at(manifest.policy_version))


@pytest.mark.nats
async def test_later_versions_are_served_by_deltas_while_the_disk_takes_its_time_over_a_snapshot(
    bus, publisher, disk
):
    host = Host()
    async with asyncio.timeout(TIMEOUT_S):
        for version in range(7):
            manifest = await publish(publisher, host, version)
            assert (manifest.snapshot_at, manifest.kept) == (0, ())
            await assert_arrives(bus, manifest)
            assert "time/snapshot_s" not in publisher.figures
        assert await asyncio.to_thread(disk.begun.wait, TIMEOUT_S)
        seen, _ = time.monotonic(), await asyncio.sleep(0.01)
        slow_s = time.monotonic() - seen
        kept = asyncio.create_task(publisher.kept_written())
        await asyncio.wait({kept}, timeout=0.01)
        assert not kept.done(), "a checkpoint waits for what it could not make again"
        disk.goes_on.set()
        await kept
    latest = publisher.latest
    assert (latest.policy_version, latest.snapshot_at) == (6, 2)
    assert [kept.policy_version for kept in latest.kept] == [3]
    assert (await bus.get("policy", PolicyManifest))[0] == latest
    await assert_arrives(bus, latest)
    for version, blob in ((2, latest.snapshot), (3, latest.kept[0].snapshot)):
        weights = {"a": HostTensor("U16", (WORDS,), words_at(version))}
        content = b"".join(snapshot_content(Weights.of(version, weights)))
        assert bytes(await Blobs(bus).get(blob)) == content, "although its memory has other versions now"
    await publish(publisher, host, 7)
    assert publisher.figures["time/snapshot_s"] >= slow_s
    await publisher.snapshots_written()
    assert publisher.latest.snapshot_at == 7, "the next one is of the version after the last was there"
    await assert_arrives(bus, publisher.latest)


@pytest.mark.nats
async def test_a_snapshot_that_cannot_be_written_leaves_the_one_before_and_the_next_version_has_another(
    bus, publisher, disk
):
    host, disk.fails = Host(), True
    disk.goes_on.set()
    with capture_logs() as logs:
        for version in range(3):
            await publish(publisher, host, version)
        await publisher.snapshots_written()
    [said] = [entry for entry in logs if entry["event"] == "snapshot_not_published"]
    assert (said["policy_version"], publisher.latest.snapshot_at) == (2, 0)
    await assert_arrives(bus, publisher.latest)
    disk.fails = False
    await publish(publisher, host, 4)
    assert "time/snapshot_s" not in publisher.figures, "none is announced yet"
    await publisher.snapshots_written()
    assert publisher.latest.snapshot_at == 4
    assert not list(disk.directory.glob(".tmp-*"))


@pytest.mark.nats
async def test_a_version_that_is_to_stay_and_cannot_be_written_ends_the_learner(bus, publisher, disk):
    host, disk.fails = Host(), True
    disk.goes_on.set()
    for version in (0, 3):
        await publish(publisher, host, version)
    with pytest.raises((BusError, StorageError), match="No space left"):
        await publisher.snapshots_written()


@pytest.mark.nats
async def test_a_disk_that_hangs_is_waited_for_a_bounded_time_and_named(publisher, disk, monkeypatch):
    monkeypatch.setattr(publication, "KEPT_S", 0.01)
    host = Host()
    for version in (0, 3):
        await publish(publisher, host, version)
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(StorageError, match=r"versions \[3\] .*keep_versions.* not written after 0 s"):
            await publisher.kept_written()


@pytest.mark.nats
async def test_versions_that_stay_wait_for_each_other_and_what_a_killed_learner_left_of_one_goes(
    bus, disk, tmp_path
):
    (tmp_path / "config.json").write_text("{}")
    kept = tmp_path / "kept"
    (kept / ".tmp-version-2").mkdir(parents=True)
    config = PublicationConfig(keep_versions=(2, 3, 4))
    publisher, host = WeightPublisher(bus, disk, config, incarnation="one", kept=kept), Host()
    await publisher.start(tmp_path)
    async with asyncio.timeout(TIMEOUT_S):
        for version in range(3):
            await publish(publisher, host, version)
        third = asyncio.create_task(publish(publisher, host, 3))
        assert await asyncio.to_thread(disk.begun.wait, TIMEOUT_S)
        await asyncio.wait({third}, timeout=0.1)
        assert not third.done(), "the memory of more than one is held for a slow disk"
        disk.goes_on.set()
        await third
        await publish(publisher, host, 4)
        await publisher.kept_written()
    assert [version.policy_version for version in publisher.latest.kept] == [2, 3, 4]
    assert sorted(path.name for path in kept.iterdir()) == ["version-2", "version-3", "version-4"]
    await publisher.close()


async def test_a_version_that_stays_lacks_no_ranks_tensors(disk, tmp_path):
    disk.goes_on.set()
    await disk.start()
    kept, weights = KeptVersions([1], tmp_path / "kept", adapters=False), Weights.of(1, Host().take(1))
    directory = await kept.begin(1)
    await put_kept(disk, snapshot_content(weights), directory, ("one", 1), rank=1, ranks=2)
    with pytest.raises(StorageError, match=r"version-1 lacks 1 tensors, as of_rank_0, though .* mount"):
        await kept.finish(1, ["of_rank_0", *weights.tensors])
    await kept.finish(1, weights.tensors)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["version-1"]


@pytest.mark.nats
async def test_a_learner_that_ends_gives_up_its_snapshot(publisher, disk):
    host = Host()
    for version in range(3):
        await publish(publisher, host, version)
    async with asyncio.timeout(TIMEOUT_S):
        assert await asyncio.to_thread(disk.begun.wait, TIMEOUT_S)
        await publisher.close()
        disk.goes_on.set()
        await asyncio.get_running_loop().shutdown_default_executor()
    assert not list(disk.directory.glob(".tmp-*"))


@pytest.mark.nats
async def test_adapters_are_not_announced_without_their_base_which_could_not_be_stored_again(
    bus, disk, tmp_path
):
    (tmp_path / "config.json").write_text("{}")
    base = AdapterBase(
        lambda blobs, _: AdaptedBase(weights=blobs[0], scale=1.0), lambda: Weights.of(0, Host().take(0))
    )
    publisher = WeightPublisher(bus, disk, PublicationConfig(snapshot_every=2), incarnation="one", base=base)
    await publisher.start(tmp_path)
    for version in range(3):
        manifest = await publish(publisher, host := Host(), version)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "put", partial(disk.put, refuses="base"))
        wanted = SnapshotWanted(incarnation="one", policy_version=2, reason="a test", lacks_base=True)
        with pytest.raises(BusError, match="refused"):
            await publisher._answer(wanted)
        disk.goes_on.set()
        await publisher.snapshots_written()
    assert (await bus.get("policy", PolicyManifest))[0] == manifest
    await publish(publisher, host, 3)
    await publisher.snapshots_written()
    assert (publisher.latest.adapted, publisher.latest.snapshot_at) == (manifest.adapted, 3)
    await publisher.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_snapshot_is_read_no_faster_than_a_ranks_part_of_its_bound(ranks):
    weights = Weights.of(0, Host().take(0))
    content = list(snapshot_content(weights))
    size = sum(memoryview(part).nbytes for part in content)
    began = time.monotonic()
    assert b"".join(HeldContent(weights, ranks * 4 * size, ranks=ranks)) == b"".join(content)
    assert time.monotonic() - began >= 0.25


WRITER = """
import asyncio, sys
from pathlib import Path
from bus.config import BusConfig
from bus.connection.bus import Bus
from learner.config.publication import PublicationConfig
from learner.publication.publisher import WeightPublisher
from storage.weights.blob_files import FileBlobs
from tests.learner.publication.test_snapshot_writing import Host

async def main(url, directory):
    async with Bus.connect(BusConfig(url=url), "test", name="learner") as bus:
        config = PublicationConfig(snapshot_every=2, snapshot_bytes_per_s=5_000_000)
        publisher = WeightPublisher(bus, FileBlobs(directory / "shared"), config, incarnation="one")
        await publisher.start(directory)
        host = Host()
        for version in range(1000):
            await publisher.publish(host.take(version), policy_version=version, stage="rl", trains_from=0)

asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
"""


async def announced(bus, *, snapshot_at):
    news = asyncio.Queue()
    await bus.listen(bus.subject("notice", "policy"), PolicyManifest, news.put_nowait)
    while (await news.get()).snapshot_at < snapshot_at:
        pass


@pytest.mark.nats
@pytest.mark.slow
async def test_a_learner_killed_at_any_moment_leaves_a_whole_snapshot_announced(bus, server, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    draw = random.Random(0)
    for _ in range(3):
        await bus.delete("policy")
        learner = await asyncio.create_subprocess_exec(sys.executable, "-c", WRITER, server.url, tmp_path)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await announced(bus, snapshot_at=2)
            await asyncio.sleep(draw.uniform(0, 0.3))  # the moment is the test's, nothing is waited for
        finally:
            learner.kill()
            await learner.wait()
        await assert_arrives(bus, (await bus.get("policy", PolicyManifest))[0])
