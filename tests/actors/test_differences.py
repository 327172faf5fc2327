"""What a delta said about two versions is known of their tensors, and of no others."""

import gc

import numpy as np
import pytest
import torch

from actors.engines import differences, sglang_changes
from actors.engines.differences import known, note
from actors.engines.sglang_changes import changes
from actors.received import torch_tensors
from storage import weights as in_parts
from storage.deltas import Moved, apply_delta, encode_delta
from storage.weights import HostTensor, Weights

NAMES = ("q", "k")


def weights(version, arrays):
    tensors = {name: HostTensor("F32", (50, 40), a.view(np.uint32).ravel()) for name, a in arrays.items()}
    return Weights.of(version, tensors)


def versions(*, far=False):
    """A version, and the next by its delta; every change that is noted."""
    rng = np.random.default_rng(0)
    first = {name: rng.normal(size=(50, 40)).astype(np.float32) for name in NAMES}
    second = {name: array.copy() for name, array in first.items()}
    for array in second.values():
        array.ravel()[rng.choice(2000, 2 if far else 300, replace=False)] += 1
    base = weights(1, first)
    return base, apply_delta(base, encode_delta(base, 2, weights(2, second).tensors).data, note=note)


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("part_bytes", [in_parts.PART_BYTES, 1000, 64])
def test_what_a_delta_said_is_what_comparing_finds(far, part_bytes, monkeypatch):
    monkeypatch.setattr(in_parts, "PART_BYTES", part_bytes)
    base, later = versions(far=far)
    old, new = torch_tensors(base.tensors), torch_tensors(later.tensors)
    strangers = {name: tensor.clone() for name, tensor in old.items()}
    compared = changes(strangers, new)
    monkeypatch.setattr(sglang_changes, "changed_positions", None)  # nothing is compared
    told = changes(old, new)
    assert told.metadata == compared.metadata
    assert told.tensors.keys() == compared.tensors.keys()
    assert all(torch.equal(tensor, compared.tensors[name]) for name, tensor in told.tensors.items())


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
    assert address not in differences._noted


@pytest.mark.parametrize(
    ("gaps", "is_noted"), [(np.array([3], np.uint8), True), (np.array([70_000], np.uint32), False),
                           (np.zeros(7, np.uint8), False)], ids=["few", "too wide", "too many"]
)  # fmt: skip
def test_what_no_file_would_have_is_not_noted(gaps, is_noted):
    old, new = torch.zeros(9), torch.ones(9)
    words = old.numpy(), new.numpy()
    note(*words, [Moved(0, gaps, words[1][: len(gaps)])])
    assert (known(old, new) is not None) is is_noted
