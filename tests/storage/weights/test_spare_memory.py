"""Memory comes back when nothing refers to it any more, and not before."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from bus.errors import StorageError
from storage.weights import tensors as in_parts
from storage.weights.array_pool import SpareMemory
from storage.weights.deltas import apply_delta
from storage.weights.tensors import HostTensor, Weights
from tests.storage.weights.encoded import encode_delta

WORDS = np.arange(1000, dtype=np.uint16)


def idle_bytes(spare):
    return sum(piece.nbytes for idle in spare._idle.values() for piece in idle)


def address(array):
    return array.ctypes.data


def test_memory_that_nobody_has_is_given_out_again():
    spare = SpareMemory()
    first = spare.like(WORDS)
    assert (first.dtype, first.shape, type(first)) == (WORDS.dtype, WORDS.shape, np.ndarray)
    first[:] = WORDS
    was, second = address(first), spare.like(WORDS)
    assert address(second) != was
    assert idle_bytes(spare) == 0
    del first
    assert idle_bytes(spare) == WORDS.nbytes
    assert address(spare.like(WORDS.view(np.uint32))) == was  # of the same size


VIEWS = {
    "array": lambda array: array[3:4],
    "other dtype": lambda array: array.view(np.int16)[::2],
    "tensor": lambda array: torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).reshape(10, 100),
    "part of a tensor": lambda array: torch.from_numpy(array.view(np.int16))[5:6],
    "memoryview": lambda array: array[3:4].data,
}


@pytest.mark.parametrize("made", VIEWS.values(), ids=VIEWS)
def test_whatever_was_made_of_an_array_keeps_its_memory(made):
    spare = SpareMemory()
    array = spare.like(WORDS)
    held = made(array)
    del array
    gc.collect()
    assert idle_bytes(spare) == 0
    del held
    gc.collect()
    assert idle_bytes(spare) == WORDS.nbytes


def test_what_is_not_needed_goes_back_to_the_system():
    spare = SpareMemory()
    kept = spare.like(WORDS)
    spare.like(WORDS)
    spare.trim()
    assert idle_bytes(spare) == 0
    del kept
    assert idle_bytes(spare) == WORDS.nbytes


@pytest.mark.parametrize("seed", range(8))
def test_versions_are_right_whoever_holds_which(seed, monkeypatch):
    """In some versions a tensor stays as it is, in some a few words of it change, a part of it, or all."""
    monkeypatch.setattr(in_parts, "PART_BYTES", 512)
    rng, spare, rooms = np.random.default_rng(seed), SpareMemory(), []
    truth = {name: rng.integers(0, 1 << 16, 1000, np.uint16) for name in "abcd"}  # equally large
    given = {name: spare.like(array) for name, array in truth.items()}
    for name, array in given.items():
        array[:] = truth[name]
    held = [weights(0, given)]
    del given, array

    def noted(words):
        if found := behind(words):
            rooms.append(weakref.ref(found[0]))
        return found

    behind, spare.behind = spare.behind, noted
    for version in range(1, 30):
        for name in truth:
            truth[name] = moved(rng, truth[name])
        data = encode_delta(held[-1], version, weights(version, truth).tensors).data
        held.append(apply_delta(held[-1], data, spare=spare))
        for tensors in held:
            assert tensors.digests == Weights.of(tensors.policy_version, tensors.tensors).digests
        assert held[-1].digests == weights(version, truth).digests
        held = [tensors for tensors in held[:-1] if rng.random() < 0.3] + held[-1:]
        if rng.random() < 0.1:
            spare.trim()
    held.clear()
    del tensors
    assert rooms
    assert not any(held_yet() is not None for held_yet in rooms), (
        "nothing keeps memory of versions that nobody holds"
    )


def weights(version, arrays):
    return Weights.of(version, {name: HostTensor("U16", a.shape, a) for name, a in arrays.items()})


def moved(rng, array):
    """The next version of an array."""
    array = array.copy()
    how = rng.random()
    if how < 0.6:
        array[rng.choice(1000, rng.integers(1, 25), replace=False)] += 1
    elif how < 0.7:
        array[100:400] += 3
    elif how < 0.8:
        array += 1
    return array


def test_memory_of_the_version_before_is_given_what_it_lacks():
    first, second = SpareMemory(), SpareMemory()
    old, new, other = (first.like(WORDS) for _ in range(3))
    first.differs(old, new, "what new has")
    was, mine = address(old), address(other)
    assert first.behind(new) is None  # it is in use
    del old, other
    assert second.behind(new) is None
    kept = first.like(WORDS)
    assert address(kept) == mine  # rather what is behind nothing
    array, lacks = first.behind(new)
    assert (address(array), lacks) == (was, "what new has")
    del array
    assert first.behind(new) is None, "somebody may have written to it"
    del kept
    spared = first.like(WORDS)
    first.differs(spared, new, "no more")
    del spared, new
    assert first.behind(WORDS) is None


def test_a_second_delta_writes_only_what_the_version_before_lacks(monkeypatch):
    monkeypatch.setattr(in_parts, "PART_BYTES", 512)
    rng, spare = np.random.default_rng(0), SpareMemory()
    now, truth = spare.like(WORDS), WORDS.copy()
    now[:] = WORDS
    held, was = weights(0, {"a": now}), [address(now)]
    del now
    for version in range(1, 6):
        truth = truth.copy()
        truth[rng.choice(1000, 9, replace=False)] += 1
        data = encode_delta(held, version, weights(version, {"a": truth}).tensors).data
        if version == 5:  # what it is said to lack is all that is written: the digest finds another fault
            [idle] = spare._idle[WORDS.nbytes]
            idle.view(np.uint16)[np.flatnonzero(truth == WORDS)[0]] += 1
            with pytest.raises(StorageError, match="digest"):
                apply_delta(held, data, spare=spare)
        held = apply_delta(held, data, spare=spare)
        was.append(address(held.tensors["a"].words))
        assert (held.tensors["a"].words == truth).all()
    assert was[:5] == [was[0], was[1], was[0], was[1], was[0]]


def test_two_threads_never_get_the_same_memory():
    spare = SpareMemory()

    def fill(value):
        for _ in range(200):
            array = spare.like(WORDS)
            array[:] = value
            if not (array == value).all():
                return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(fill, range(8)))
    assert idle_bytes(spare) <= 2 * 8 * WORDS.nbytes  # each has the next before it lets go of the last
