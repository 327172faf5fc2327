"""Files of records: what a kill, a full disk, rotation and other runs leave in them."""

import errno
import os
import signal
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from storage.account import records
from storage.account.records import RECORD_BYTES, AccountRecord, AccountWriter, Copy, Kind, read_records
from storage.store.replay import ReplayStore
from tests.factories import make_trajectory
from tests.storage.serving import refusing_disk


def record(lease_id: int, **changes) -> AccountRecord:
    copy = Copy(lease_id, 3, bytes(range(16)), 0.25)
    return AccountRecord(Kind.SENT, copy, 7, since_s=1.5, written_s=2.5)._replace(**changes)


def read(directory, run="") -> list[AccountRecord]:
    return [one for file in read_records(directory, run=run) for one in file.records]


def test_records_are_read_as_they_were_written(tmp_path):
    written = [
        record(1),
        record(1 << 40, kind=Kind.ACKNOWLEDGED, flag=True, number=1 << 50),
        record(2, copy=Copy(2, 0, b"\xff" * 16, None)),
    ]
    writer = AccountWriter(tmp_path, "actor-host-1")
    writer.add(written[:1])
    writer.add([])
    writer.add(written[1:])
    assert read(tmp_path) == written  # the kernel has them: nobody has closed the file
    writer.close()
    [file] = read_records(tmp_path)
    assert (file.owner.writer, file.garbled, len(file.owner.host) > 0) == ("actor-host-1", 0, True)
    assert read(tmp_path / "missing") == []


def test_a_killed_process_has_lost_none_and_what_it_cut_short_is_left_out(tmp_path):
    pid = os.fork()
    if not pid:
        writer = AccountWriter(tmp_path, "actor")
        for n in range(50):
            writer.add([record(n)])
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert [one.copy.lease_id for one in read(tmp_path)] == list(range(50))
    [path] = tmp_path.iterdir()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
        file.seek(-2 * RECORD_BYTES, os.SEEK_END)  # within the last whole record
        file.write(b"\xee")
    [found] = read_records(tmp_path)
    assert (len(found.records), found.garbled) == (48, 1)
    path.write_bytes(path.read_bytes()[:20])  # a header that was cut short
    assert read(tmp_path) == []


def test_what_a_full_disk_refuses_is_written_once_it_has_room(tmp_path, monkeypatch):
    writer = AccountWriter(tmp_path, "actor")
    writer.add([record(0)])
    with capture_logs() as logs, refusing_disk():
        for n in range(1, 4):
            writer.add([record(n)])
    assert [entry["event"] for entry in logs] == ["account_not_written"]
    writer.add([record(4)])
    assert [one.copy.lease_id for one in read(tmp_path)] == [0, 1, 2, 3, 4]

    write = os.write

    def cut_off(file, data):  # the disk takes the first bytes of a record, and then no more
        if len(data) < RECORD_BYTES * 2:
            raise OSError(errno.ENOSPC, "no room")
        return write(file, data[: RECORD_BYTES + 10])

    monkeypatch.setattr(records.os, "write", cut_off)
    writer.add([record(n) for n in (5, 6)])
    monkeypatch.undo()
    writer.add([record(7)])
    assert [one.copy.lease_id for one in read(tmp_path)] == list(range(8))
    assert all(file.garbled == 0 for file in read_records(tmp_path))


def test_memory_for_refused_records_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "PENDING_BYTES", 10 * RECORD_BYTES)
    writer = AccountWriter(tmp_path, "actor")
    with capture_logs(), refusing_disk():
        for n in range(50):
            writer.add([record(n)])
    writer.add([record(50)])
    assert records.incomplete_writers(tmp_path) == {"actor"}
    assert [one.copy.lease_id for one in read(tmp_path)] == [*range(40, 51)]


@pytest.mark.parametrize("name", ["actor", "rewards/" + "x" * 300])
def test_files_are_bounded_and_so_is_their_directory(tmp_path, monkeypatch, name):
    monkeypatch.setattr(records, "FILE_BYTES", 20 * RECORD_BYTES)
    monkeypatch.setattr(records, "DIRECTORY_BYTES", 100 * RECORD_BYTES)
    writer = AccountWriter(tmp_path, name)
    for n in range(400):
        writer.add([record(n)])
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 105 * RECORD_BYTES
    found = [one.copy.lease_id for one in read(tmp_path)]
    assert found == list(range(found[0], 400))
    assert records.incomplete_writers(tmp_path) == {name}
    assert len(found) > 50


def test_a_full_disk_is_freed_of_the_oldest_records(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "FILE_BYTES", 20 * RECORD_BYTES)
    monkeypatch.setattr(records, "DIRECTORY_BYTES", 40 * RECORD_BYTES)
    (tmp_path / f"actor{records.INCOMPLETE}").symlink_to("/dev/full")
    writer = AccountWriter(tmp_path, "actor")
    for n in range(100):
        writer.add([record(n)])
    assert len([*tmp_path.glob(f"*{records.SUFFIX}")]) <= 3
    assert max(one.copy.lease_id for one in read(tmp_path)) == 99


def test_records_of_an_earlier_run_of_the_same_name_are_left_out(tmp_path):
    writer = AccountWriter(tmp_path, "actor")
    writer.add([record(0)], run="old")
    writer.add([record(1)], run="new")
    assert [one.copy.lease_id for one in read(tmp_path, run="new")] == [1]


def test_a_shard_says_what_it_did_not_store_and_why(tmp_path):
    store = ReplayStore.open(tmp_path)
    first = [make_trajectory(0, sample) for sample in range(2)]
    store.append(first)
    other = replace(first[0], reward=0.5)
    store.append([other, *[make_trajectory(2, 0)]])
    assert store.close_short([2], fewest=1) == [2]
    store.append([make_trajectory(2, 1)])
    store.settle(1, (), seen=1)
    store.append([first[1]])
    dropped = read(tmp_path / records.DROPPED)
    assert [(one.copy, records.DropReason(one.number).name) for one in dropped] == [
        (Copy.of(other), "HELD"),
        (Copy.of(make_trajectory(2, 1)), "CLOSED"),
        (Copy.of(first[1]), "SETTLED"),
    ]
    store.close()
    ReplayStore.open(tmp_path).close()  # and the store opens with that directory in it
