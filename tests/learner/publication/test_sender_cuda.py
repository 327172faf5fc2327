"""Tests where a sender has what it is to send on a GPU (`pytest -m gpu tests/learner`)."""

import contextlib
import gc

import pytest
import torch

from learner.host_memory.copies import host_tensors
from learner.publication import shared_copy
from learner.publication.broadcast_process import Source
from learner.publication.shared_copy import SharedCopy
from storage.weights.tensors import Weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
MIB = 1 << 20
DEVICE = "cuda:0"


def copied(version, memory=None):
    """16 buckets of 1 MiB, and one of 5 between them."""
    state = {f"small {n}": torch.randn(MIB // 4) + version for n in range(8)}
    state |= {"large": torch.randn(5 * MIB // 4)} | {
        f"{name} again": -tensor for name, tensor in state.items()
    }
    return SharedCopy(Weights.of(version, host_tensors(state)), memory)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(shared_copy, "BUCKET_BYTES", MIB)


def placed(source, copy):
    """Return what would be broadcast, after `prepare`."""
    return b"".join(place.cpu().numpy().tobytes() for place in source._placed(copy.where()))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("device_bytes", "ahead_mib"), [(0, 0), (4 * MIB - 1, 3), (12 * MIB, 8), (1 << 50, 21)]
)
def test_every_version_is_on_the_device_as_it_was_copied(device_bytes, ahead_mib):
    source, memory = Source(DEVICE, device_bytes), None
    for version in range(3):
        copy = copied(version, memory)
        memory = copy.memory
        assert source.prepare(copy.where()) == ""
        assert len(source._ahead) == ahead_mib * MIB
        assert (len(source._staging) == 0) == (device_bytes > 21 * MIB), "none where nothing is to be staged"
        assert placed(source, copy) == memory.bytes[: 21 * MIB].tobytes()


@pytest.mark.usefixtures("small")
def test_a_gpu_that_is_full_takes_them_by_the_usual_way_and_that_is_said_once():
    gc.collect()  # else what other tests have left is freed later, and there is room
    torch.cuda.empty_cache()
    taken = gaps_taken()
    allow(21 * MIB)
    try:
        source, copy = Source(DEVICE, 1 << 50), copied(0)
        assert "no room for learner.publication.broadcast_device_bytes" in source.prepare(copy.where())
        assert placed(source, copy) == copy.memory.bytes[: 21 * MIB].tobytes()
        later = copied(1)
        assert source.prepare(later.where()) == ""
        assert placed(source, later) == later.memory.bytes[: 21 * MIB].tobytes()
    finally:
        taken.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)


def allow(more: int) -> None:
    """Let this process take `more` bytes of the device than its allocator holds."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more) / total)


def gaps_taken() -> list[torch.Tensor]:
    """Tensors in all gaps that earlier tests left in the allocator's memory and that 21 MiB would fit in."""
    allow(0)
    taken = []
    with contextlib.suppress(torch.OutOfMemoryError):
        while True:
            taken.append(torch.empty(21 * MIB, dtype=torch.uint8, device=DEVICE))
    return taken
