import errno
import math
import os
import subprocess
import sys
import threading
from functools import cache
from itertools import product
from pathlib import Path
from threading import Event

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor

from bus.errors import ConfigError, TrainingError
from learner.backends.megatron.optimizer import offload, state_file
from learner.backends.megatron.optimizer.offload import FiledAdamW, OffloadedAdamW
from learner.backends.megatron.optimizer.state_file import StateFile
from learner.backends.megatron.trainer import Trainer
from learner.checkpoint.commit import load_checkpoint, save_checkpoint
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.data.packing import pack
from storage.disk.checkpoints import latest as latest_checkpoint
from tests.learner.division import divide_world
from tests.learner.reference import reference_optimizer, reference_step
from tests.learner.tiny import TIS, hf_state, random_samples, tiny_model

pytestmark = pytest.mark.slow

LENGTHS = [5, 17, 2, 32, 9]
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1)


def trainer_of(offload, *, clip_grad=1.0, directory=None, **settings):
    model = tiny_model()
    changes = {"offload": offload, "clip_grad": clip_grad, "offload_directory": directory}
    optimizer = OPTIMIZER.model_copy(update=changes)
    return Trainer(model.config, hf_state(model), optimizer, **settings)


def train(trainer, steps):
    return [
        trainer.train_step(pack(random_samples(LENGTHS, seed=step), 40), TIS, policy_version=3)
        for step in steps
    ]


def on_the_host(trainer):
    [part] = trainer.optimizer.chained_optimizers
    return part.optimizer.received


@pytest.mark.parametrize("fraction", [0.3, 1.0])
def test_four_steps_follow_plain_torch_adamw(fraction):
    reference, trainer = tiny_model(), trainer_of(fraction)
    optimizer = reference_optimizer(reference, OPTIMIZER)
    for step, result in enumerate(train(trainer, range(4))):
        samples = random_samples(LENGTHS, seed=step)
        expected = reference_step(reference, optimizer, samples, loss="tis", lr=1e-3)
        assert (result.loss, result.grad_norm) == pytest.approx(expected, abs=2e-5)
    exported = trainer.export()
    assert all((exported[k] - tensor).abs().max() < 1e-5 for k, tensor in hf_state(reference).items())


@cache
def resident(dtype: torch.dtype = torch.float32) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of three steps whose state is all on the device; no norm is clipped."""
    trainer = trainer_of(0.0, clip_grad=math.inf, dtype=dtype)
    return [result.loss for result in train(trainer, range(3))], trainer.export()


def assert_as_resident(trainer: Trainer, dtype: torch.dtype = torch.float32) -> None:
    losses, weights = resident(dtype)
    assert [result.loss for result in train(trainer, range(3))] == losses
    for name, ours in trainer.export().items():
        assert torch.equal(ours, weights[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fraction", [0.3, 1.0])
def test_where_the_state_lies_changes_no_bit_of_the_weights(fraction, dtype):
    # the norm adds up what is on the host last, so that clipping by it could differ in the last bit
    assert_as_resident(trainer_of(fraction, clip_grad=math.inf, dtype=dtype), dtype)


@pytest.mark.parametrize("fraction", [0.3, 1.0])
def test_the_fraction_is_what_lies_apart_from_the_model(fraction):
    trainer = trainer_of(fraction)
    [part] = trainer.optimizer.chained_optimizers
    assert type(part.optimizer) is OffloadedAdamW
    mains = part.get_parameters()
    apart = [main for main in mains if main in on_the_host(trainer)]
    found = sum(main.numel() for main in apart) / sum(main.numel() for main in mains)
    assert fraction <= found <= fraction + max(main.numel() for main in mains) / sum(m.numel() for m in mains)
    weights = {buffer.param_data.untyped_storage().data_ptr() for buffer in part.buffers}
    assert not any(main.untyped_storage().data_ptr() in weights for main in apart)


def test_a_skipped_step_changes_nothing_on_the_host():
    trainer = trainer_of(1.0)
    train(trainer, range(1))
    [part] = trainer.optimizer.chained_optimizers
    before = {p: {k: v.clone() for k, v in part.optimizer.state[p].items()} for p in part.get_parameters()}
    samples = random_samples(LENGTHS)
    samples[0].loss_mask[1:] = True
    samples[0].streams["behaviour_logprobs"][:] = float("nan")
    result = trainer.train_step(pack(samples, 100), TIS, policy_version=3)
    assert result.skipped
    for parameter, values in before.items():
        assert all(torch.equal(value, part.optimizer.state[parameter][k]) for k, value in values.items())


@pytest.mark.first(1, others=pytest.mark.nightly)
@pytest.mark.parametrize(("before", "after"), [(0.6, 0.0), (0.0, 0.6), (0.3, 1.0)])
def test_a_checkpoint_goes_on_with_another_fraction(tmp_path, before, after):
    uninterrupted = train(trainer_of(before), range(4))
    first = trainer_of(before)
    train(first, range(2))
    save_checkpoint(first, tmp_path, 2, {}, keep=1)
    second = trainer_of(after)
    load_checkpoint(second, latest_checkpoint(tmp_path))
    for resumed, expected in zip(train(second, range(2, 4)), uninterrupted[2:], strict=True):
        assert resumed.loss == pytest.approx(expected.loss, abs=1e-5)
        assert resumed.grad_norm == pytest.approx(expected.grad_norm, abs=1e-5)
    assert second.counts.steps_done == 4


def test_what_does_not_combine_is_refused():
    with pytest.raises(ValidationError, match=r"offload=0\.5 needs state_dtype=float32: it is bfloat16"):
        OptimizerConfig(offload=0.5, state_dtype="bfloat16")
    apart = ParallelConfig(distributed_optimizer=False)
    needs = r"offload=0\.5 needs parallel\.distributed_optimizer=true"
    with pytest.raises(ConfigError, match=needs):
        trainer_of(0.5, parallel=apart)


# --- files ---

IN_EVERY_RUN = ((1, 0.3, torch.float32), (20_000, 1.0, torch.bfloat16), (2**26, 0.3, torch.float32))


@pytest.mark.parametrize(
    ("bucket_bytes", "fraction", "dtype"),
    [
        pytest.param(*case, marks=() if case in IN_EVERY_RUN else pytest.mark.nightly)
        for case in product((1, 20_000, 2**26), (0.3, 1.0), (torch.float32, torch.bfloat16))
    ],
)
def test_in_files_the_state_changes_no_bit_of_the_weights(
    tmp_path, monkeypatch, fraction, dtype, bucket_bytes
):
    monkeypatch.setattr(offload, "BUCKET_BYTES", bucket_bytes)
    monkeypatch.setattr(state_file, "CHUNK_BYTES", 10_000)
    filed = trainer_of(fraction, clip_grad=math.inf, dtype=dtype, directory=tmp_path)
    [part] = filed.optimizer.chained_optimizers
    assert type(part.optimizer) is FiledAdamW
    assert_as_resident(filed, dtype)


class LastMoment:
    """A transfer that happens when somebody waits for it first."""

    def __init__(self, begin):
        self.begin = begin

    def wait(self):
        if self.begin is not None:
            self.begin().wait()
            self.begin = None


def test_no_bucket_is_computed_with_before_it_has_come_or_overwritten_before_it_has_left(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(offload, "BUCKET_BYTES", 20_000)
    read, write = StateFile.read, StateFile.write
    monkeypatch.setattr(StateFile, "read", lambda *at: LastMoment(lambda: read(*at)))
    monkeypatch.setattr(StateFile, "write", lambda *at: LastMoment(lambda: write(*at)))
    assert_as_resident(trainer_of(1.0, clip_grad=math.inf, directory=tmp_path))


def test_a_large_tensor_takes_memory_once_in_an_update(tmp_path, monkeypatch):
    monkeypatch.setattr(offload, "BUCKET_BYTES", 1)
    read, pieces, memory = StateFile.read, [], {}

    def read_noted(file, into, start):
        pieces.append(into.nbytes)
        memory[into.untyped_storage().data_ptr()] = into.untyped_storage().nbytes()
        return read(file, into, start)

    monkeypatch.setattr(StateFile, "read", read_noted)
    model = tiny_model(intermediate_size=512)
    optimizer = OPTIMIZER.model_copy(update={"offload": 1.0, "offload_directory": tmp_path})
    train(Trainer(model.config, hf_state(model), optimizer), range(1))
    largest, *others = sorted(pieces, reverse=True)
    assert len(memory) == 3
    rest = [size for size in others if size < largest]
    assert max(memory.values()) == largest
    assert sum(memory.values()) < 3 * largest
    assert min(memory.values()) in rest


def test_the_file_holds_the_weights_and_moments_and_has_no_name(tmp_path):
    trainer = trainer_of(1.0, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []
    train(trainer, range(2))
    [part] = trainer.optimizer.chained_optimizers
    numbers = 3 * sum(main.numel() for main in part.get_parameters())
    written = torch.empty(numbers)
    part.optimizer.file.read(written, 0).wait()
    for main in part.get_parameters():
        start, size = part.optimizer.places[main], main.numel()
        state = part.optimizer.state[main]
        for n, values in enumerate((main, state["exp_avg"], state["exp_avg_sq"])):
            assert torch.equal(written[start + n * size : start + (n + 1) * size], values)
            assert values.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_next_optimizer_gets_the_room_of_the_last_one(tmp_path, dtype):
    def mapped():
        return sum(str(tmp_path) in line for line in Path("/proc/self/maps").read_text().splitlines())

    trainer = trainer_of(1.0, directory=tmp_path, dtype=dtype)
    train(trainer, range(2))
    weights = trainer.export()
    assert mapped() == 1
    trainer.set_optimizer(trainer.optimizer_config)
    assert mapped() == 1
    assert all(torch.equal(weights[name], now) for name, now in trainer.export().items())
    trainer.set_optimizer(OPTIMIZER)
    assert mapped() == 0
    assert all(torch.equal(weights[name], now) for name, now in trainer.export().items())
    assert not any(result.skipped for result in train(trainer, range(1)))


def test_a_skipped_step_changes_nothing_in_the_file(tmp_path):
    trainer = trainer_of(1.0, directory=tmp_path)
    train(trainer, range(1))
    [part] = trainer.optimizer.chained_optimizers
    before, weights = part.optimizer.file.mapped.clone(), trainer.export()
    samples = random_samples(LENGTHS)
    samples[0].loss_mask[1:] = True
    samples[0].streams["behaviour_logprobs"][:] = float("nan")
    assert trainer.train_step(pack(samples, 100), TIS, policy_version=3).skipped
    assert torch.equal(part.optimizer.file.mapped, before)
    assert all(torch.equal(weights[name], after) for name, after in trainer.export().items())


@pytest.mark.parametrize(("before", "after"), [("file", "file"), ("file", "device"), ("device", "file")])
def test_a_checkpoint_goes_on_with_files_or_without(tmp_path, before, after):
    places = {"file": {"offload": 1.0, "directory": tmp_path / "state"}, "device": {"offload": 0.0}}
    first = trainer_of(**places[before], dtype=torch.bfloat16)
    train(first, range(2))
    save_checkpoint(first, tmp_path / "checkpoints", 2, {}, keep=1)
    second = trainer_of(**places[after], dtype=torch.bfloat16)
    load_checkpoint(second, latest_checkpoint(tmp_path / "checkpoints"))
    [part] = second.optimizer.chained_optimizers
    if after == "file":
        file = part.optimizer.file.mapped.untyped_storage().data_ptr()
        for main, state in part.optimizer.state.items():
            for values in (main, state["exp_avg"], state["exp_avg_sq"]):
                assert values.untyped_storage().data_ptr() == file
    for resumed, expected in zip(train(second, range(2, 4)), train(first, range(2, 4)), strict=True):
        assert (resumed.loss, resumed.grad_norm) == pytest.approx((expected.loss, expected.grad_norm))
    for ours, theirs in zip(second.export().values(), first.export().values(), strict=True):
        assert torch.equal(ours, theirs)


def of_ranks(directory):
    """Losses and weights of ranks that share the state of a model with experts, on one of them."""
    parallel = ParallelConfig(expert=2)
    divide_world(parallel)
    model = tiny_model("qwen3_moe")
    optimizer = OPTIMIZER.model_copy(update={"offload": 0.6, "offload_directory": directory})
    trainer = Trainer(model.config, hf_state(model), optimizer, dtype=torch.bfloat16, parallel=parallel)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    losses = [
        trainer.train_step(
            pack(random_samples(LENGTHS, seed=step)[rank::ranks], 40), TIS, policy_version=3
        ).loss
        for step in range(3)
    ]
    return losses, trainer.export()


def test_each_rank_has_a_file_of_its_own_share(worlds, tmp_path):
    (filed, weights), (in_memory, expected) = (worlds.run(2, of_ranks, d)[0] for d in (tmp_path, None))
    assert filed == in_memory
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_a_disk_without_room_is_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot take the 8796\.1 GB .* only .* GB are free"):
        StateFile(tmp_path, 2**41)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"offload_directory=.*/file cannot take the 0\.0 GB"):
        StateFile(tmp_path / "file", 8)


def test_a_disk_that_fails_or_hangs_ends_the_run_with_its_name(tmp_path, monkeypatch):
    trainer = trainer_of(1.0, directory=tmp_path)
    hangs = Event()

    def hang(*_):
        hangs.wait(60)
        raise OSError(errno.EIO, "gone")

    monkeypatch.setattr(os, "preadv", hang)
    monkeypatch.setattr(state_file, "TIMEOUT_S", 0.01)
    with pytest.raises(
        TrainingError, match=rf"reading .* MB of optimizer state in {tmp_path} took more than"
    ):
        train(trainer, range(1))
    hangs.set()
    monkeypatch.setattr(state_file, "TIMEOUT_S", 60.0)
    with pytest.raises(TrainingError, match=r"reading .* failed \(.*gone\): repair the disk"):
        train(trainer, range(1))


def test_a_process_ends_although_a_read_hangs(tmp_path):
    program = f"""
import os, pathlib, threading, torch
from learner.backends.megatron.optimizer import state_file
os.preadv, state_file.TIMEOUT_S = lambda *_: threading.Event().wait(), 0.01
state_file.StateFile(pathlib.Path({str(tmp_path)!r}), 8).read(torch.empty(8), 0).wait()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert "the disk hangs or is too slow" in done.stderr


def test_a_file_has_no_name_when_its_room_is_taken(tmp_path, monkeypatch):
    named = []

    def refuse(*_):
        named.extend(tmp_path.iterdir())
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ConfigError, match="full"):
        StateFile(tmp_path, 8)
    assert named == []


def test_a_file_that_nobody_has_any_more_is_closed_behind_what_is_being_written(tmp_path, monkeypatch):
    def threads():
        return [each for each in threading.enumerate() if each.name == "optimizer-state"]

    before, write, go_on = threads(), os.pwritev, Event()
    written = []

    def write_later(*args):
        assert go_on.wait(60)
        written.append(write(*args))
        return written[-1]

    monkeypatch.setattr(os, "pwritev", write_later)
    file = StateFile(tmp_path, 8)
    mine = [each for each in threads() if each not in before]
    transfer = file.write(torch.ones(8), 0)
    del file
    go_on.set()
    transfer.wait()
    for thread in mine:
        thread.join(60)
    assert written == [32]
    assert not any(thread.is_alive() for thread in mine)
    open_files = [each.readlink() for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    assert not any(str(tmp_path) in str(each) for each in open_files)


def test_a_directory_that_would_take_nothing_is_refused(tmp_path):
    with pytest.raises(ValidationError, match=r"offload_directory=.* has no effect with offload=0"):
        OptimizerConfig(offload_directory=tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beside_a_device_the_state_lies_in_files_and_trains_as_in_memory(tmp_path, dtype):
    filed, offloaded = (trainer_of(1.0, dtype=dtype, directory=d) for d in (tmp_path, None))
    for ours, theirs in zip(train(filed, range(4)), train(offloaded, range(4)), strict=True):
        assert (ours.loss, ours.grad_norm) == pytest.approx((theirs.loss, theirs.grad_norm), rel=1e-4)
    for ours, theirs in zip(filed.export().values(), offloaded.export().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beside_a_device_the_state_lies_in_pinned_memory_and_trains_alike(dtype):
    offloaded, resident = trainer_of(1.0, dtype=dtype), trainer_of(0.0, dtype=dtype)
    for ours, theirs in zip(train(offloaded, range(4)), train(resident, range(4)), strict=True):
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5 if dtype == torch.float32 else 0.03)
    assert all(main.is_pinned() for main in on_the_host(offloaded))
    [part] = offloaded.optimizer.chained_optimizers
    assert not any(values["exp_avg"].is_cuda for values in part.optimizer.state.values())
