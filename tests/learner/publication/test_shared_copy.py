"""Copies of weights that other processes map, and the sender's side of them."""

import asyncio
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bus.errors import BusError, TrainingError
from bus.weight_requests import BroadcastWanted
from learner.host_memory.copies import host_tensors
from learner.publication import broadcast_process as sender
from learner.publication import shared_copy
from learner.publication.broadcast import SPARES, START_S, Broadcaster, _SenderProcess
from learner.publication.broadcast_process import KEPT, LEFT_BYTES, Source
from learner.publication.shared_copy import ALIGNED, Memory, SharedCopy
from storage.weights.tensors import RemoteTensor, Weights
from tests.actors.gloo_rank import GlooRank

STATE = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "none": torch.zeros(0, 4),
    "b": torch.ones(5, dtype=torch.bfloat16),
    "large": torch.arange(1000, dtype=torch.int64),
    "c": torch.tensor(3.0),
}


def weights(version=0, state=STATE):
    return Weights.of(version, host_tensors(state))


def bytes_of(state):
    return {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in state.items()}


def bytes_in(copy):
    """Return the bytes of each tensor from where it lies."""
    sizes = {name: tensor.nbytes for name, tensor in STATE.items()}
    return {
        name: copy.memory.bytes[offset : offset + sizes[name]].tobytes()
        for bucket in copy.buckets
        for name, offset in zip(bucket.names, bucket.offsets, strict=True)
    }


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(shared_copy, "BUCKET_BYTES", 2 * ALIGNED)
    monkeypatch.setattr(shared_copy, "PIECE_BYTES", 100)


@pytest.mark.usefixtures("small")
def test_tensors_lie_together_in_buckets_and_are_copied_in_pieces():
    with ThreadPoolExecutor(3) as threads:
        copy = SharedCopy(weights(), threads=threads, hashed=True)
    digests = {name: d for b in copy.buckets for name, d in zip(b.names, b.digests, strict=True)}
    assert digests == {name: sha256(data).digest() for name, data in bytes_of(STATE).items()}
    assert [bucket.names for bucket in copy.buckets] == [["a", "none", "b"], ["large"], ["c"]]
    assert [(bucket.begin, bucket.end) for bucket in copy.buckets] == [(0, 128), (128, 8128), (8128, 8192)]
    assert bytes_in(copy) == bytes_of(STATE)


@pytest.mark.usefixtures("small")
def test_an_engine_takes_no_more_at_once_than_the_largest_tensor():
    state = {name: torch.zeros(2 * ALIGNED // 4) for name in "abcdefg"} | {"d": torch.zeros(6 * ALIGNED // 4)}
    together = SharedCopy(weights(state=state)).taken_together()
    names = [[name for bucket in buckets for name in bucket.names] for buckets in together]
    assert names == [["a", "b", "c"], ["d"], ["e", "f", "g"]]
    assert list(SharedCopy(weights(state={})).taken_together()) == []


def test_tensors_of_another_rank_are_fetched_once():
    mine, fetched = weights(), 0

    def remote(tensor):
        def read(start, stop):
            nonlocal fetched
            fetched += stop - start
            return tensor.words.view(np.uint8)[start:stop].data

        return RemoteTensor(tensor.dtype, tensor.shape, read)

    theirs = {name: remote(tensor) for name, tensor in mine.tensors.items()}
    assert bytes_in(SharedCopy(replace(mine, tensors=theirs))) == bytes_of(STATE)
    assert fetched == mine.size_bytes


def test_a_copy_is_made_in_memory_of_its_size():
    first = SharedCopy(weights())
    again = {name: tensor + 1 for name, tensor in STATE.items()}
    second = SharedCopy(weights(1, again), first.memory)
    assert second.memory is first.memory
    assert bytes_in(second) == bytes_of(again)
    other = Memory(first.memory.size_bytes * 2)
    assert SharedCopy(weights(), other).memory is not other


def test_a_sender_sees_what_is_copied_into_memory_that_it_has_mapped():
    copy, source = SharedCopy(weights()), Source("cpu")
    assert source.prepare(copy.where()) == ""
    mapped = source._mapped[copy.memory.number]
    SharedCopy(weights(1, {name: tensor + 1 for name, tensor in STATE.items()}), copy.memory)
    assert mapped.numpy().tobytes() == copy.memory.bytes.tobytes()


@pytest.fixture
def device(monkeypatch):
    """Give a device as a sender has one; it is the host's memory, of which as much is free as is said."""
    free = {"bytes": 1 << 40}
    monkeypatch.setattr(sender, "lock_pages", lambda memory: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free["bytes"], 1 << 40))
    return free


@pytest.mark.usefixtures("small", "device")
@pytest.mark.parametrize(
    ("device_bytes", "ahead", "room"),
    [(0, 0, 8000), (127, 0, 8000), (200, 128, 8000), (8128, 8128, 64), (8192, 8192, 0), (1 << 50, 8192, 0)],
)
def test_a_sender_has_whole_buckets_on_its_device_and_room_for_the_others(device_bytes, ahead, room):
    copy, source = SharedCopy(weights()), Source("cpu:0", device_bytes)
    assert source.prepare(copy.where()) == ""
    assert source._ahead.numpy().tobytes() == copy.memory.bytes[:ahead].tobytes()
    assert len(source._staging) == room


@pytest.mark.usefixtures("device")
def test_a_sender_has_the_version_on_its_device_that_it_is_to_send():
    source = Source("cpu:0", 1 << 50)
    copies = [SharedCopy(weights(n, {name: tensor + n for name, tensor in STATE.items()})) for n in range(2)]
    for copy in [*copies, copies[0], SharedCopy(weights(2), copies[0].memory)]:
        source.prepare(copy.where())
        assert source._ahead.numpy().tobytes() == copy.memory.bytes[: copy.buckets[-1].end].tobytes()


@pytest.mark.usefixtures("small")
def test_a_sender_says_once_why_it_sends_slowly(device, monkeypatch):
    def refused(memory):
        raise TrainingError("the system locks no pages")

    monkeypatch.setattr(sender, "lock_pages", refused)
    device["bytes"] = LEFT_BYTES - 1
    copy, source = SharedCopy(weights()), Source("cpu:0", 8192)
    said = source.prepare(copy.where())
    assert said.startswith(
        "the system locks no pages; no room for learner.publication.broadcast_device_bytes=8192"
    )
    assert "less than 1 GiB left" in said
    assert (len(source._ahead), len(source._staging)) == (0, 8000), "all takes the usual way"
    device["bytes"] = 1 << 40
    assert source.prepare(SharedCopy(weights(1)).where()) == ""
    assert len(source._ahead) == 0


async def test_a_sender_is_told_of_the_memory_that_it_may_take(monkeypatch):
    async def start(order):
        raise BusError(str(order["device_bytes"]))

    monkeypatch.setattr("learner.publication.broadcast._SenderProcess.start", start)
    found, threads = weights(), []

    def announced():
        threads.append(threading.current_thread())
        return found

    broadcaster = Broadcaster(
        SimpleNamespace(secured=False), announced, incarnation="one", timeout_s=1.0, device_bytes=7
    )
    wanted = BroadcastWanted(incarnation="one", policy_version=0, group="", ranks=1, device="cpu", nonce="")
    with pytest.raises(BusError, match=r"^7$"):
        await broadcaster._offer(wanted)
    assert threading.main_thread() not in threads[:2], "lent weights are copied when they are asked for"


async def test_an_engine_that_asks_while_the_learner_ends_gets_no_group():
    found = weights()

    def announced():
        broadcaster._closed = True
        return found

    broadcaster = Broadcaster(SimpleNamespace(secured=False), announced, incarnation="one", timeout_s=1.0)
    wanted = BroadcastWanted(incarnation="one", policy_version=0, group="", ranks=1, device="cpu", nonce="")
    with pytest.raises(BusError, match="weights of learner one are not to be had"):
        await broadcaster._offer(wanted)
    assert not broadcaster._asking


def test_a_sender_keeps_the_memory_it_used_last():
    copies, source = [SharedCopy(weights(version)) for version in range(KEPT + 1)], Source("cpu")
    first, *later = [copy.memory.number for copy in copies]
    for copy in [*copies[:-1], copies[0], copies[-1]]:
        source.prepare(copy.where())
    assert list(source._mapped) == [first, later[-1]]


@pytest.mark.slow
async def test_an_engine_that_meets_the_sender_of_a_killed_learner_hears_of_the_end():
    order = {
        "group": "mine", "world_size": 2, "backend": "gloo", "device": "cpu", "device_bytes": 0,
        "timeout_s": 60.0, "connect_s": 60.0,
    }  # fmt: skip
    process, copy = await _SenderProcess.start(order), SharedCopy(weights())
    try:
        port = (await process.says("port", START_S))["port"]
        await process.prepares(copy)
        process._process.stdin.close()  # as the system does with those of a process that was killed
        process._process.stdout._transport.close()
        body = {"group_name": "mine", "world_size": 2, "rank_offset": 1}
        met = {**body, "master_address": "127.0.0.1", "master_port": port}
        rank = await asyncio.to_thread(GlooRank, met)
        async with asyncio.timeout(60):
            assert await process._process.wait() == 0
        asked = {"names": ["c"], "dtypes": ["float32"], "shapes": [[]]}
        with pytest.raises(RuntimeError, match=r"closed by peer|reset by peer"):
            await asyncio.to_thread(rank.receive, asked)
    finally:
        await process.end()


@pytest.mark.slow
def test_what_libraries_print_in_a_sender_is_none_of_its_lines():
    prints = "import os; from learner.publication import broadcast_process as sender; "
    prints += "sender._output = sender._own_output(); "
    prints += "os.write(1, b'NCCL INFO'); print('noise', flush=True); sender._say(port=1)"
    ended = subprocess.run([sys.executable, "-c", prints], capture_output=True, check=True, timeout=120)
    assert json.loads(ended.stdout) == {"port": 1}
    assert b"NCCL INFO" in ended.stderr


def test_copies_that_are_sent_late_take_no_more_memory_than_two_of_them():
    broadcaster = Broadcaster(
        SimpleNamespace(secured=False), lambda: None, incarnation="one", timeout_s=1.0, threads=1
    )
    broadcaster._groups["slow"] = None
    newest = late = None
    memories = set()
    for version in range(8):
        newest = None
        newest = broadcaster._copied(weights(version))
        memories.add(newest.memory.number)
        if version % 2:  # a slow engine takes every other version, while the next is copied
            late = newest
    assert len(memories) == SPARES
    assert late is newest
