import threading
from contextlib import nullcontext

import pytest
import torch

from bus.errors import TrainingError
from learner.host_memory import copies as copies_module
from learner.host_memory.copies import CopyBuffers, LockedMemory, pieces

MEGABYTE = 1 << 20


@pytest.fixture
def locking(monkeypatch):
    """Parts of memory as threads lock them, once `allowed`; there is no CUDA."""
    parts, allowed = [], threading.Event()

    def lock(memory):
        assert allowed.wait(60)
        parts.append((memory.ctypes.data, memory.nbytes))

    monkeypatch.setattr(copies_module, "LOCKED_BYTES", MEGABYTE)
    monkeypatch.setattr(copies_module, "lock_pages", lock)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    return parts, allowed


def test_memory_is_locked_part_by_part_beside_other_work(locking):
    parts, allowed = locking
    memory = LockedMemory(3 * MEGABYTE + 5)  # returns before anything is locked
    assert not memory.is_locked
    assert parts == []
    allowed.set()
    [first, last] = memory.tensors([((3 * MEGABYTE,), torch.uint8), ((5,), torch.uint8)])
    assert memory.is_locked
    start = first.data_ptr()
    rest = copies_module.page_bytes(5)
    assert sorted(parts) == [
        *((start + n * MEGABYTE, MEGABYTE) for n in range(3)),
        (start + 3 * MEGABYTE, rest),
    ]
    assert last.data_ptr() == start + 3 * MEGABYTE


def test_memory_that_cannot_be_locked_is_told_where_it_is_needed(locking, monkeypatch):
    def refuse(memory):
        raise TrainingError("no memory")

    monkeypatch.setattr(copies_module, "lock_pages", refuse)
    memory = LockedMemory(2 * MEGABYTE)
    with pytest.raises(TrainingError, match="no memory"):
        memory.tensors([])


def test_memory_that_is_never_locked_is_waited_for_so_long_only(locking, monkeypatch):
    monkeypatch.setattr(copies_module, "LOCKING_TIMEOUT_S", 0.0)
    memory = LockedMemory(5)
    with pytest.raises(TrainingError, match="not locked 5 bytes"):
        memory.tensors([])
    locking[1].set()


@pytest.mark.parametrize("start", [0, 64, 128])
@pytest.mark.parametrize("rows", [0, 1, 16, 40, 333])
def test_no_piece_of_a_copy_crosses_a_border_of_what_is_locked(monkeypatch, start, rows):
    monkeypatch.setattr(copies_module, "LOCKED_BYTES", 192)
    source, place = torch.arange(2.0 * rows).reshape(2, rows).T, torch.zeros(rows, 2)
    for to, of in pieces(place, source, start):
        first = start + to.data_ptr() - place.data_ptr()
        assert first // 192 == max(first, first + to.nbytes - 1) // 192
        to.copy_(of)
    assert torch.equal(place, source)


WAIT_S = 60


def kept_beside(copies):
    """Begin to let the state change, and return what is set when it may."""
    kept = threading.Event()
    threading.Thread(target=lambda: (copies.keep(), kept.set()), daemon=True).start()
    return kept


def test_a_change_waits_until_little_is_left_to_copy(monkeypatch):
    monkeypatch.setattr(copies_module, "LEFT_BYTES", 8)
    whole = torch.arange(6.0)
    copies = CopyBuffers().copies([whole[:2], whole[2:4], whole[4:]])
    kept = kept_beside(copies)
    first = copies.take(0)
    assert not kept.wait(0.05)
    second = copies.take(1)
    assert kept.wait(WAIT_S)
    assert copies.held_up_s > 0
    whole[:] = -1.0
    assert [first.tolist(), second.tolist(), copies.take(2).tolist()] == [[0, 1], [2, 3], [4, 5]]


def test_a_change_waits_no_more_when_nothing_is_written_any_more(monkeypatch):
    monkeypatch.setattr(copies_module, "LEFT_BYTES", 0)
    copies = CopyBuffers().copies([torch.zeros(2)])
    kept = kept_beside(copies)
    assert not kept.wait(0.05)
    copies.end()
    assert kept.wait(WAIT_S)


def test_a_change_waits_for_a_disk_a_bounded_time_and_loses_nothing(monkeypatch):
    monkeypatch.setattr(copies_module, "LEFT_BYTES", 0)
    monkeypatch.setattr(copies_module, "LEFT_TIMEOUT_S", 0.01)
    state = torch.zeros(2)
    copies = CopyBuffers().copies([state])
    copies.keep()
    state[:] = 1.0
    assert copies.take(0).tolist() == [0, 0]


def test_copies_are_of_what_was_there_before_it_changed():
    whole = torch.arange(6.0)
    copies = CopyBuffers().copies([whole[:2], whole[2:4], whole[4:]])
    last = copies.take(2)  # in any order
    assert last.untyped_storage().nbytes() == last.nbytes  # a view's copy is without the rest
    whole[4:] = -1.0  # it is copied already
    copies.keep()
    whole[:] = -1.0
    copies.keep()
    assert [copies.take(0).tolist(), copies.take(1).tolist(), last.tolist()] == [[0, 1], [2, 3], [4, 5]]
