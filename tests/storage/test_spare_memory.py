"""Memory comes back when nothing refers to it any more, and not before."""

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from storage.spare_memory import SpareMemory

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
