"""What a delta said about two versions is known of their tensors, and of no others."""

import gc

import numpy as np
import pytest
import torch

from actors.engines.sglang import changes as sglang_changes
from actors.engines.sglang.changes import changes, known, note
from actors.weights.received import torch_tensors
from storage.weights import tensors as in_parts
from storage.weights.deltas import Moved, apply_delta
from storage.weights.tensors import HostTensor, Weights
from tests.storage.weights.encoded import encode_delta

NAMES = ("q", "k")
DTYPES = {"float32": "F32", "int64": "I64"}


def weights(version, arrays):
    tensors = {
        name: HostTensor(DTYPES[a.dtype.name], a.shape, a.view(f"u{a.itemsize}").ravel())
        for name, a in arrays.items()
    }
    return Weights.of(version, tensors)


def by_delta(first, second):
    """A version, and the next by its delta; every change that is noted."""
    base = weights(1, first)
    return base, apply_delta(base, encode_delta(base, 2, weights(2, second).tensors).data, note=note)


def versions(*, far=False):
    """Two of them, some elements of which are others in the second."""
    rng = np.random.default_rng(0)
    first = {name: rng.normal(size=(50, 40)).astype(np.float32) for name in NAMES}
    second = {name: array.copy() for name, array in first.items()}
    for array in second.values():
        array.ravel()[rng.choice(2000, 2 if far else 300, replace=False)] += 1
    return by_delta(first, second)


def assert_told_as_compared(base, later, monkeypatch):
    """What the delta told of is what comparing finds, and nothing is compared for it."""
    old, new = torch_tensors(base.tensors), torch_tensors(later.tensors)
    strangers = {name: tensor.clone() for name, tensor in old.items()}
    compared = changes(strangers, new)
    monkeypatch.setattr(sglang_changes, "changed_positions", None)
    told = changes(old, new)
    assert told.metadata == compared.metadata
    assert told.tensors.keys() == compared.tensors.keys()
    assert all(torch.equal(tensor, compared.tensors[name]) for name, tensor in told.tensors.items())


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("part_bytes", [in_parts.PART_BYTES, 1000, 64])
def test_what_a_delta_said_is_what_comparing_finds(far, part_bytes, monkeypatch):
    monkeypatch.setattr(in_parts, "PART_BYTES", part_bytes)
    assert_told_as_compared(*versions(far=far), monkeypatch)


def test_a_tensor_of_which_a_part_came_whole_is_compared(monkeypatch):
    monkeypatch.setattr(in_parts, "PART_BYTES", 800)
    first = {"q": np.zeros((50, 40), np.float32)}
    second = {"q": first["q"].copy()}
    second["q"].ravel()[:200] = np.arange(1, 201)  # all of the first part
    second["q"].ravel()[1999] = 7
    base, later = by_delta(first, second)
    old, new = torch_tensors(base.tensors), torch_tensors(later.tensors)
    assert known(old["q"], new["q"]) is None
    found = changes(old, new)
    assert found.tensors["values.float32"].tolist() == [*range(1, 201), 7]


def test_integers_and_single_elements_go_whole_though_a_delta_told_of_them():
    first = {"q": np.zeros(1000, np.float32), "ids": np.arange(1000), "scale": np.ones(1, np.float32)}
    second = {name: array.copy() for name, array in first.items()}
    for array in second.values():
        array[0] += 1
    base, later = by_delta(first, second)
    tensors, more = torch_tensors(base.tensors), torch_tensors(later.tensors)
    big = torch.zeros(100_000)
    found = changes(tensors | {"still": big}, more | {"still": big})
    whole = {name for name in found.tensors if name.startswith("whole.")}
    assert whole == {"whole.ids", "whole.scale"}
    assert found.tensors["values.float32"].tolist() == [1.0]


@pytest.mark.parametrize(
    ("start", "told"), [(65541, [5, 65535]), (65542, [5, 65535, 0]), (196_700, [5, 65535, 65535, 65535, 86])]
)
def test_a_gap_from_one_part_to_the_next_is_one_as_well(start, told):
    old, new = torch.zeros(200_000), torch.arange(200_000.0)
    before, words = (tensor.numpy().view(np.uint32) for tensor in (old, new))
    gaps = np.array([0], np.uint8)
    note(before, words, [Moved(0, gaps + 5, words[5:6]), Moved(start, gaps, words[start : start + 1])])
    told_gaps, values = known(old, new)
    assert told_gaps.tolist() == told
    assert values.view(np.float32).tolist() == [5.0, *range(65541, start, 65536), start]


@pytest.mark.parametrize("part_bytes", [in_parts.PART_BYTES, 400_000])
def test_rows_that_nobody_sees_make_gaps_that_are_bridged(part_bytes, monkeypatch):
    """Embeddings have such rows."""
    monkeypatch.setattr(in_parts, "PART_BYTES", part_bytes)
    rng = np.random.default_rng(0)
    first = {"q": rng.normal(size=(4000, 400)).astype(np.float32)}
    second = {"q": first["q"].copy()}
    rows = rng.choice(4000, 8, replace=False)
    second["q"][rows] += rng.random((8, 400)) < 0.3
    assert_told_as_compared(*by_delta(first, second), monkeypatch)


def test_of_other_tensors_nothing_is_known():
    base, later = versions()
    old, new = torch_tensors(base.tensors), torch_tensors(later.tensors)
    assert known(old["q"], new["q"]) is not None
    assert known(old["k"], new["q"]) is None
    assert known(old["q"].clone(), new["q"]) is None
    assert known(old["q"], new["q"].clone()) is None
    assert known(old["q"][:1], new["q"]) is None
    assert known(old["q"].t(), new["q"].t()) is None
    assert known(new["q"], old["q"]) is None


def test_what_is_known_goes_with_the_tensors():
    base, later = versions()
    new = torch_tensors(later.tensors)
    del later
    address = new["q"].data_ptr()
    assert known(torch_tensors(base.tensors)["q"], new["q"]) is not None
    del base
    gc.collect()
    assert known(new["k"], new["q"]) is None  # what it was made of is no more
    del new
    gc.collect()
    assert address not in sglang_changes._noted


@pytest.mark.parametrize(
    ("gaps", "is_noted"),
    [(np.array([3], np.uint8), True), (np.zeros(7, np.uint8), False)],
    ids=["few", "too many"],
)
def test_what_no_file_would_have_is_not_noted(gaps, is_noted):
    old, new = torch.zeros(9), torch.ones(9)
    words = old.numpy(), new.numpy()
    note(*words, [Moved(0, gaps, words[1][: len(gaps)])])
    assert (known(old, new) is not None) is is_noted
