"""Each tensor of a snapshot lies where it was received, and its pages go when nothing refers to it."""

import gc
import json

import numpy as np
import psutil
import pytest
import torch

from bus.errors import StorageError
from storage.weights.new_memory import new_memory, words_in
from storage.weights.tensors import HostTensor, Weights, read_snapshot, snapshot_content

MIB = 1 << 20


def received(content):
    data = new_memory(sum(memoryview(part).nbytes for part in content))
    data[:] = b"".join(content)
    return data


def snapshot(**tensors):
    return snapshot_content(
        Weights.of(0, {n: HostTensor("F32", words.shape, words) for n, words in tensors.items()})
    )


def resident():
    gc.collect()
    return psutil.Process().memory_info().rss


def test_tensors_stay_where_they_were_received_and_go_one_by_one():
    words = {name: np.random.default_rng(0).integers(1, 1 << 32, 4 * MIB, np.uint32) for name in "abc"}
    read = read_snapshot(received(snapshot(**words)), 0).tensors
    full = resident()
    held = torch.from_numpy(read["b"].words.view(np.int32)[5:])
    del read
    assert full - resident() > 24 * MIB  # of 32
    assert (held.numpy() == words["b"].view(np.int32)[5:]).all()
    del held
    assert full - resident() > 40 * MIB  # of 48: the process itself may have grown by some


def test_neighbours_on_one_page_outlive_each_other():
    words = {str(n): np.full(size, n, np.uint32) for n, size in enumerate((3000, 5, 1, 2000, 1024, 7000, 9))}
    for gone in words:
        read = dict(read_snapshot(received(snapshot(**words)), 0).tensors)
        del read[gone]
        assert all((tensor.words == int(name)).all() for name, tensor in read.items())


def test_other_memory_is_copied():
    words = np.arange(1000, dtype=np.uint32)
    content = b"".join(snapshot(a=words))
    array = np.frombuffer(content, np.uint8).copy()
    for data in (content, array.data, memoryview(content)):
        assert words_in(data, np.uint32, 10, 0) is None
    [read] = read_snapshot(array.data, 0).tensors.values()
    array[:] = 0
    assert (read.words == words).all()


def test_tensors_that_overlap_are_refused():
    places = {"a": [0, 6], "b": [4, 8]}
    header = json.dumps(
        {
            name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
            for name, (begin, end) in places.items()
        }
    ).encode()
    with pytest.raises(StorageError, match="two tensors have the byte 4"):
        read_snapshot(len(header).to_bytes(8, "little") + header + bytes(8), 0)


def test_memory_of_no_bytes_is_there():
    assert len(new_memory(0)) == 0
