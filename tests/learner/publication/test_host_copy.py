"""Weights on their way from the model to the host."""

import asyncio
import weakref
from concurrent.futures import ThreadPoolExecutor
from mmap import PAGESIZE

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from learner.backends.megatron.trainer import Trainer
from learner.config.lora import NO_LORA, LoraConfig
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import pack
from learner.host_memory.copies import host_memory, host_tensors, page_bytes
from learner.publication import host_copy
from learner.publication.host_copy import HostCopy, copy_weights
from tests.learner.tiny import FAMILIES, TIS, hf_state, random_samples, tiny_model


def trainer_of(family="qwen3", *, tied=False, dtype=torch.float32):
    model = tiny_model(family, tied=tied)
    return Trainer(model.config, hf_state(model), OptimizerConfig(lr=1e-2), dtype=dtype)


def taken(host, trainer, **over):
    return asyncio.run(arrived(host, trainer, **over))


async def arrived(host, trainer, **over):
    with ThreadPoolExecutor(1) as thread:
        return await (await copy_weights(host, trainer, thread, **over)).arrived()


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


def test_copies_take_turns_and_convert():
    trainer, host = trainer_of(), HostCopy(torch.bfloat16)
    first = taken(host, trainer)
    before = {name: weight.bfloat16() for name, weight in trainer.export().items()}
    train(trainer)
    second = taken(host, trainer)
    assert same(first, before)
    assert same(second, {name: weight.bfloat16() for name, weight in trainer.export().items()})
    assert not same(second, before)
    assert taken(host, trainer) is first


def test_a_copy_over_the_last_one_gives_the_memory_of_the_other_back():
    trainer, host = trainer_of(), HostCopy(torch.float32)
    old = weakref.ref(next(iter(taken(host, trainer).values())).words)
    last = taken(host, trainer)
    train(trainer)
    assert host.can_overwrite
    assert taken(host, trainer, over_last=True) is last
    assert same(last, trainer.export())
    assert old() is None
    assert taken(host, trainer) is not last


def test_training_waits_for_one_call_of_torch():
    """Names, dictionaries and a split of queries, keys and values cost as much as a third of the copy."""
    trainer, host = trainer_of(), HostCopy(torch.bfloat16)
    for _ in range(2):
        taken(host, trainer)
    with Operations() as operations:
        taken(host, trainer)
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
