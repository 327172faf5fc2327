"""Weights on their way from the model to the host."""

import asyncio
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from mmap import PAGESIZE

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bus.errors import StorageError
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.megatron.trainer import Trainer
from learner.config.lora import NO_LORA, LoraConfig
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import pack
from learner.host_memory.copies import host_memory, host_tensors, page_bytes
from learner.publication import host_copy
from learner.publication.host_copy import HostCopy, copy_weights
from learner.publication.lent_weights import lent_among
from storage.weights.tensors import Weights, snapshot_content
from tests.learner.backends.torch_backend import TorchBackend
from tests.learner.tiny import FAMILIES, TIS, hf_state, random_samples, tiny_model

NORM = "model.norm.weight"


def trainer_of(family="qwen3", *, tied=False, dtype=torch.float32):
    model = tiny_model(family, tied=tied)
    return Trainer(model.config, hf_state(model), OptimizerConfig(lr=1e-2), dtype=dtype)


def taken(host, trainer):
    return asyncio.run(arrived(host, trainer))


async def arrived(host, trainer):
    with ThreadPoolExecutor(1) as thread:
        return await (await copy_weights(host, trainer, thread)).arrived()


def same(found, state):
    expected = host_tensors(state)
    return found.keys() == expected.keys() and all(
        found[name].same_kind(tensor) and np.array_equal(found[name].words, tensor.words)
        for name, tensor in expected.items()
    )


def train(trainer):
    trainer.train_step(pack(random_samples([5, 9]), 40), TIS, policy_version=0)


class Operations(TorchDispatchMode):
    """Writes down what torch is asked to do."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.append(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


@pytest.mark.first(5, others=pytest.mark.slow)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_the_copy_has_every_weight_by_its_hugging_face_name(family, tied):
    trainer = trainer_of(family, tied=tied)
    assert same(taken(HostCopy(torch.float32), trainer), trainer.export())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [NO_LORA, LoraConfig(rank=2, publish="merged")])
def test_the_bias_by_which_experts_are_chosen_is_published_as_it_is(dtype, lora):
    model = tiny_model("glm4_moe")
    state = hf_state(model)
    trainer = Trainer(model.config, state, OptimizerConfig(), dtype=dtype, lora=lora)
    found = taken(HostCopy(torch.bfloat16), trainer)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert same({name: found[name]}, {name: state[name]})
    if lora.exists:
        assert trainer.adapters.exact == {name: torch.float32}


def copied_at_once(host, trainer):
    return host.take(trainer.exported()).wait()


def test_copies_take_turns_and_convert():
    trainer, host = trainer_of(), HostCopy(torch.bfloat16)
    first = copied_at_once(host, trainer)
    before = {name: weight.bfloat16() for name, weight in trainer.export().items()}
    train(trainer)
    second = copied_at_once(host, trainer)
    assert same(first, before)
    assert same(second, {name: weight.bfloat16() for name, weight in trainer.export().items()})
    assert not same(second, before)
    assert copied_at_once(host, trainer) is first


BACKENDS = [Trainer, FsdpTrainer, TorchBackend]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lent_weights_stay_as_long_as_they_are_read_and_then_go(backend, dtype):
    model = tiny_model()
    trainer = backend(model.config, hf_state(model), OptimizerConfig(lr=1e-2), dtype=torch.float32)
    host = HostCopy(dtype)
    for read in (True, False):
        before = {name: weight.to(dtype) for name, weight in trainer.export().items()}
        found = taken(host, trainer)
        lent, old = lent_among(found), weakref.ref(lent_among(found).tensors[NORM].place)
        if not read:
            lent.end_reading()
        assert same(found, before)
        deque(trainer.streamed(), maxlen=0)  # the export and a checkpoint change nothing
        assert same(found, before)
        train(trainer)
        if read:
            assert same(found, before)
            assert lent.keep()
        else:
            assert not lent.keep()
            assert dtype == torch.float32 or old() is None, "copies go with the views"
            with pytest.raises(StorageError, match="trained further"):
                found[NORM].part(0)
        assert same(taken(host, trainer), {n: weight.to(dtype) for n, weight in trainer.export().items()})


def test_weights_on_a_cpu_are_published_from_where_they_lie():
    """All but queries, keys and values, which Megatron has in one piece."""
    trainer = trainer_of()
    mine = {parameter.data_ptr() for parameter in trainer.chunks[0].parameters()}
    found = lent_among(taken(HostCopy(torch.float32), trainer)).tensors
    copied = {name for name, tensor in found.items() if tensor.is_copy}
    assert copied == {name for name in found if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")}
    assert found[NORM].place.ctypes.data in mine


def test_weights_that_are_kept_stay_when_their_publication_ends():
    trainer = trainer_of()
    before, found = trainer.export(), taken(HostCopy(torch.float32), trainer)
    lent = lent_among(found)
    lent.end_reading()
    assert lent.keep()
    train(trainer)
    assert same(found, before)


def test_each_of_several_publications_of_the_same_weights_keeps_them():
    trainer, host = trainer_of(), HostCopy(torch.float32)
    before = trainer.export()
    found = [taken(host, trainer) for _ in range(2)]
    train(trainer)
    assert all(same(one, before) for one in found)


def test_pieces_that_were_read_stay_when_the_weights_change():
    trainer = trainer_of()
    before, found = host_tensors(trainer.export()), taken(HostCopy(torch.float32), trainer)
    content = snapshot_content(Weights(0, found, {}))
    pieces = [bytes(piece) for piece in content]
    held = [found[name].part(0) for name in found]
    lent_among(found).end_reading()
    train(trainer)
    assert pieces == [
        bytes(memoryview(piece).cast("B")) for piece in snapshot_content(Weights(0, before, {}))
    ]
    assert all(np.array_equal(held, before[name].words) for name, held in zip(found, held, strict=True))


def test_training_waits_for_one_call_of_torch():
    """Names, dictionaries and a split of queries, keys and values cost as much as a third of the copy."""
    trainer, host = trainer_of(), HostCopy(torch.bfloat16)
    for _ in range(2):
        copied_at_once(host, trainer)
    with Operations() as operations:
        copied_at_once(host, trainer)
    assert operations.names == ["_foreach_copy_"]


def test_a_short_copy_on_a_cpu_wakes_no_thread(monkeypatch):
    trainer, host = trainer_of(), HostCopy(torch.bfloat16)
    with ThreadPoolExecutor(1) as thread:
        asyncio.run(copy_weights(host, trainer, thread))
        assert not thread._threads
        monkeypatch.setattr(host_copy, "SHORT_BYTES", trainer.size_bytes - 1)
        asyncio.run(copy_weights(host, trainer, thread))
        assert len(thread._threads) == 1


def test_parameters_that_were_moved_are_copied_from_where_they_are():
    trainer, host = trainer_of(), HostCopy(torch.float32)
    taken(host, trainer)
    parameter = next(trainer.chunks[0].parameters())
    parameter.data = parameter.detach() + 1
    assert same(taken(host, trainer), trainer.export())


@pytest.mark.parametrize(
    ("size_bytes", "pages"), [(0, 1), (1, 1), (PAGESIZE, 1), (PAGESIZE + 1, 2), (999 * PAGESIZE, 999)]
)
def test_memory_of_the_host_is_whole_pages_and_no_more(size_bytes, pages):
    assert page_bytes(size_bytes) == pages * PAGESIZE


def test_tensors_on_the_host_lie_in_one_piece_and_have_the_shapes_that_were_asked_for():
    wanted = [((3, 5), torch.bfloat16), ((0,), torch.float32), ((), torch.int64), ((40,), torch.float32)]
    found = host_memory(wanted, page_locked=False)
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in found] == wanted
    start = found[0].data_ptr()
    assert (start % PAGESIZE, found[2].data_ptr() - start, found[3].data_ptr() - start) == (0, 64, 128)
    found[0].fill_(1)
    assert not found[3].any()
    assert host_memory([], page_locked=False) == []


@pytest.mark.gpu
def test_page_locked_memory_takes_what_was_asked_for_and_is_given_back():
    for _ in range(2):  # as likely as not at the same place
        [memory] = host_memory([((3 << 20,), torch.uint8)], page_locked=True)
        assert memory.is_pinned()
        memory.copy_(torch.arange(3 << 20, device="cuda").to(torch.uint8), non_blocking=True)
        torch.cuda.synchronize()
        assert memory[:4].tolist() == [0, 1, 2, 3]
        del memory


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_beside_training_has_the_weights_from_before_it(dtype):
    trainer, host = trainer_of(dtype=dtype), HostCopy(torch.bfloat16)

    async def copied_while_training():
        with ThreadPoolExecutor(1) as thread:
            loop = asyncio.get_running_loop()
            for _ in range(4):
                before = await loop.run_in_executor(thread, trainer.export)
                copied = await copy_weights(host, trainer, thread)
                await loop.run_in_executor(thread, train, trainer)
                expected = {name: weight.bfloat16().cpu() for name, weight in before.items()}
                assert same(await copied.arrived(), expected)

    asyncio.run(copied_while_training())
