import json
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from bus.errors import ConfigError, StorageError
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.megatron.checkpoint_state import saved_tensors
from learner.backends.megatron.optimizer.optimizer import load_optimizer_state
from learner.backends.megatron.trainer import Trainer
from learner.backends.shared.trainable import TrainableWeights
from learner.checkpoint import commit
from learner.checkpoint.commit import load_checkpoint, read_extra, save_checkpoint, start_checkpoint
from learner.config.parallel import ParallelConfig
from learner.data.packing import pack
from learner.host_memory import copies
from storage.disk import checkpoints
from storage.disk.checkpoints import latest as latest_checkpoint
from tests.learner.checkpoint.saved_trainers import OPTIMIZER, train, trainer_of
from tests.learner.tiny import FAMILIES, hf_state, random_samples, tiny_model

SUITES = dict.fromkeys(
    ("qwen3_moe", "deepseek_v3", "gemma3_text", "gpt_oss", "qwen3_next", "qwen3_5_text"), pytest.mark.slow
)
"""Those of families with layers of a kind of their own; the others' runs are nightly."""


@pytest.fixture(scope="module")
def untrained(tmp_path_factory) -> Path:
    """A checkpoint, which nobody changes."""
    directory = tmp_path_factory.mktemp("checkpoints")
    save_checkpoint(trainer_of(tiny_model()), directory, 0, {}, keep=1)
    return latest_checkpoint(directory)


def test_no_checkpoint_fails_because_the_one_before_it_is_gone(tmp_path, monkeypatch):
    class NothingToWrite:
        def write(self):
            return {"file": "digest"}

    monkeypatch.setattr(commit.checkpoints, "latest", lambda root: root / "gone")  # as a stale listing has it
    (temporary := tmp_path / "temporary").mkdir()
    assert commit._written(NothingToWrite(), temporary, tmp_path / "final") == {"file": "digest"}


@pytest.mark.first(2, others=pytest.mark.nightly)
@pytest.mark.parametrize(
    "family",
    [
        name if name == "qwen3" else pytest.param(name, marks=SUITES.get(name, pytest.mark.nightly))
        for name in FAMILIES
    ],
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=[pytest.mark.slow, pytest.mark.nightly])]
)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path, dtype, family):
    uninterrupted = train(trainer_of(tiny_model(family), dtype=dtype), range(6))
    first = trainer_of(tiny_model(family), dtype=dtype)
    train(first, range(3))
    save_checkpoint(first, tmp_path, 3, {"policy_version": 7}, keep=2)

    second = trainer_of(tiny_model(family, seed=1), dtype=dtype)
    train(second, range(10, 12))  # its own optimizer state must not survive
    assert load_checkpoint(second, latest_checkpoint(tmp_path)) == {"policy_version": 7}
    assert (second.counts.steps_done, second.counts.updates_done) == (3, 3)
    for resumed, expected in zip(train(second, range(3, 6)), uninterrupted[3:], strict=True):
        assert resumed.loss == pytest.approx(expected.loss, abs=1e-5)
        assert resumed.grad_norm == pytest.approx(expected.grad_norm, abs=1e-5)
        assert resumed.lr == expected.lr


def test_a_checkpoint_before_the_first_step_resumes(untrained):
    resumed = trainer_of(tiny_model(seed=1))
    load_checkpoint(resumed, untrained)
    [ours], [expected] = train(resumed, [0]), train(trainer_of(tiny_model()), [0])
    assert ours == expected


def test_the_random_state_is_restored(tmp_path):
    trainer = trainer_of(tiny_model())
    save_checkpoint(trainer, tmp_path, 1, {}, keep=1)
    expected = torch.rand(3)
    load_checkpoint(trainer, latest_checkpoint(tmp_path))
    assert torch.equal(torch.rand(3), expected)


def test_only_the_newest_are_kept_and_the_same_step_is_replaced(tmp_path):
    trainer = trainer_of(tiny_model())
    assert latest_checkpoint(tmp_path) is None
    for step, note in [(1, "a"), (2, "b"), (10, "c"), (10, "d")]:
        save_checkpoint(trainer, tmp_path, step, {"note": note}, keep=2)
    assert len(list(tmp_path.iterdir())) == 2
    assert read_extra(latest_checkpoint(tmp_path)) == {"note": "d"}


def test_an_interrupted_save_is_not_a_checkpoint(tmp_path, monkeypatch):
    trainer = trainer_of(tiny_model())
    save_checkpoint(trainer, tmp_path, 1, {}, keep=2)
    with monkeypatch.context() as patched:
        patched.setattr("learner.checkpoint.commit.write_manifest", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            save_checkpoint(trainer, tmp_path, 2, {}, keep=2)
    assert read_extra(latest_checkpoint(tmp_path)) == {}
    save_checkpoint(trainer, tmp_path, 3, {}, keep=2)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("name", ["__0_0.distcp", "common.pt", ".metadata"])
def test_a_torn_checkpoint_is_refused(untrained, tmp_path, name):
    directory = shutil.copytree(untrained, tmp_path / untrained.name)
    torn = directory / name
    torn.write_bytes(torn.read_bytes()[:-10])
    with pytest.raises(StorageError, match="is torn"):
        load_checkpoint(trainer_of(tiny_model()), directory)


def test_a_checkpoint_without_manifest_is_refused(tmp_path):
    with pytest.raises(StorageError, match="not a whole checkpoint"):
        load_checkpoint(trainer_of(tiny_model()), tmp_path)


def test_a_checkpoint_of_another_model_is_refused_with_the_differences(untrained):
    with pytest.raises(ConfigError, match=r"model_type is qwen3, not llama, .*head_dim is 24, not 16"):
        load_checkpoint(trainer_of(tiny_model("llama")), untrained)


def test_a_checkpoint_is_refused_by_the_name_of_what_would_be_computed_otherwise(untrained, tmp_path):
    with pytest.raises(ConfigError, match=r"of another model: rms_norm_eps is 1e-06, not 0\.001"):
        load_checkpoint(trainer_of(tiny_model(rms_norm_eps=1e-3)), untrained)
    shutil.copytree(untrained, older := tmp_path / "older")
    manifest = json.loads((older / "manifest.json").read_text())
    del manifest["model"]["rms_norm_eps"]
    (older / "manifest.json").write_text(json.dumps(manifest))
    load_checkpoint(trainer_of(tiny_model()), older)


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_show_in_it(tmp_path, held_writer):
    trainer = trainer_of(tiny_model())
    train(trainer, range(3))
    pending = start_checkpoint(trainer, tmp_path, 3, {}, keep=2)
    uninterrupted = train(trainer, range(3, 6))
    assert not pending.written
    assert latest_checkpoint(tmp_path) is None
    held_writer.set()
    pending.finish()

    resumed = trainer_of(tiny_model(seed=1))
    load_checkpoint(resumed, latest_checkpoint(tmp_path))
    assert train(resumed, range(3, 6)) == uninterrupted


def test_what_is_loaded_while_a_checkpoint_is_written_does_not_show_in_it(tmp_path, untrained, held_writer):
    trainer = trainer_of(tiny_model(seed=1))
    expected = trainer.export()
    pending = start_checkpoint(trainer, tmp_path, 3, {}, keep=2)
    load_checkpoint(trainer, untrained)
    held_writer.set()
    pending.finish()
    load_checkpoint(trainer, latest_checkpoint(tmp_path))
    assert all(torch.equal(weight, expected[name]) for name, weight in trainer.export().items())


def test_a_checkpoint_on_a_cpu_is_copied_when_the_next_update_comes_and_not_before(tmp_path):
    trainer = trainer_of(tiny_model())
    staged = trainer.stage_checkpoint(tmp_path)
    [part] = trainer.optimizer.chained_optimizers
    moments = [moment for state in part.optimizer.state.values() for moment in state.values()]
    ours = [*trainer.model.parameters(), *moments]
    held = {tensor.untyped_storage().data_ptr() for tensor in ours}

    def in_place() -> list[bool]:
        waiting = staged.copies._waiting.values()
        return [tensor.untyped_storage().data_ptr() in held for tensor in waiting]

    assert len(in_place()) > len(moments)
    assert all(in_place())
    trainer.logprobs(pack(random_samples([5]), 40))
    assert all(in_place())
    train(trainer, range(1))
    assert in_place() == []


@pytest.mark.parametrize("backend", [Trainer, FsdpTrainer])
def test_a_step_copies_nothing_of_a_checkpoint_that_the_disk_soon_has(
    tmp_path, monkeypatch, held_writer, backend
):
    monkeypatch.setattr(copies, "LEFT_BYTES", 0)
    model = tiny_model()
    trainer = backend(model.config, hf_state(model), OPTIMIZER)
    expected = trainer.export()
    pending = start_checkpoint(trainer, tmp_path, 1, {}, keep=2)
    saved = pending._staged.copies
    keep, copied = saved.keep, []

    def spy():
        held_writer.set()
        keep()
        copied.extend(copy for copy in saved._copies if copy is not None)

    saved.keep = spy
    train(trainer, range(1))
    assert held_writer.is_set()
    assert copied == []
    pending.finish()
    load_checkpoint(trainer, latest_checkpoint(tmp_path))
    assert all(torch.equal(weight, expected[name]) for name, weight in trainer.export().items())


def test_a_step_does_not_wait_for_a_checkpoint_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(copies, "LEFT_BYTES", 0)
    trainer = trainer_of(tiny_model())

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(commit, "_written", refuse)
    pending = start_checkpoint(trainer, tmp_path, 1, {}, keep=2)
    began = time.monotonic()
    train(trainer, range(1))
    assert time.monotonic() - began < copies.LEFT_TIMEOUT_S / 2
    with pytest.raises(StorageError, match="the disk is full"):
        pending.finish()


def test_the_time_of_a_checkpoint_is_told_by_part(tmp_path):
    trainer, parts = trainer_of(tiny_model()), {"before", "directory", "memory", "state"}
    first = start_checkpoint(trainer, tmp_path, 1, {}, keep=2)
    began = time.perf_counter()
    second = start_checkpoint(trainer, tmp_path, 2, {}, keep=2, after=first)
    took = time.perf_counter() - began
    assert took / 2 < sum(second.seconds[part] for part in parts) <= took
    second.finish()
    assert second.seconds.keys() == parts | {"write", "copy", "held_up"}
    assert second.seconds["write"] > 0
    assert second.seconds["memory"] == second.seconds["copy"] == 0  # a CPU has neither


def kinds_of(tensors):
    return sorted((tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors)


@pytest.mark.parametrize("matrices", ["adamw", "muon"])
def test_memory_is_prepared_for_what_a_checkpoint_copies(tmp_path, matrices):
    trainer = trainer_of(tiny_model())
    trainer.set_optimizer(OPTIMIZER.model_copy(update={"matrices": matrices}))
    prepared = kinds_of(saved_tensors(trainer))
    train(trainer, range(1))
    staged = trainer.stage_checkpoint(tmp_path)
    assert kinds_of(staged.copies._waiting.values()) == prepared
    trainer.prepare_checkpoints()
    assert trainer._checkpoint_buffers._memory is None  # a learner without a GPU copies in its turn


def test_a_checkpoint_is_written_by_itself(tmp_path):
    pending = start_checkpoint(trainer_of(tiny_model()), tmp_path, 3, {}, keep=2)
    assert not pending._writing.exception(timeout=60)
    assert pending.written
    assert latest_checkpoint(tmp_path) is None
    pending.finish()
    pending.finish()  # once more does nothing
    assert latest_checkpoint(tmp_path) is not None


def test_one_checkpoint_is_finished_before_the_next_begins(tmp_path):
    trainer = trainer_of(tiny_model())
    first = start_checkpoint(trainer, tmp_path, 1, {}, keep=2)
    second = start_checkpoint(trainer, tmp_path, 2, {}, keep=2, after=first)
    assert first.finished
    assert not second.finished
    assert latest_checkpoint(tmp_path).name == "step_00000001"
    second.finish()
    assert latest_checkpoint(tmp_path).name == "step_00000002"


def test_training_waits_for_no_removal_of_an_older_checkpoint_and_the_files_of_the_next_do(
    tmp_path, monkeypatch
):
    trainer = trainer_of(tiny_model())
    save_checkpoint(trainer, tmp_path, 1, {}, keep=1)
    held, discard = threading.Event(), checkpoints.discard
    monkeypatch.setattr(checkpoints, "discard", lambda pruned: held.wait(60) and discard(pruned))
    second = start_checkpoint(trainer, tmp_path, 2, {}, keep=1)
    second.finish()
    assert latest_checkpoint(tmp_path).name == "step_00000002"
    [old] = tmp_path.glob(".tmp-*")
    assert any(old.iterdir())
    third = start_checkpoint(trainer, tmp_path, 3, {}, keep=1, after=second)
    train(trainer, range(1))
    [beside] = set(tmp_path.glob(".tmp-*")) - {old}
    assert not list(beside.glob("*.distcp"))
    held.set()
    third.finish()
    assert not old.exists()
    third.old_removed()
    assert {path.name for path in tmp_path.iterdir()} == {"step_00000003"}
    load_checkpoint(trainer, latest_checkpoint(tmp_path))


def test_the_next_checkpoint_tells_that_an_older_one_could_not_be_removed(tmp_path, monkeypatch):
    def refuse(pruned):
        raise PermissionError(13, "Permission denied")

    trainer = trainer_of(tiny_model())
    save_checkpoint(trainer, tmp_path, 1, {}, keep=1)
    monkeypatch.setattr(checkpoints, "discard", refuse)
    second = start_checkpoint(trainer, tmp_path, 2, {}, keep=1)
    second.finish()
    third = start_checkpoint(trainer, tmp_path, 3, {}, keep=1, after=second)
    with pytest.raises(
        StorageError, match=r"cannot write checkpoint .*step_00000003: rank 0: .* may not be used"
    ):
        third.finish()
    monkeypatch.undo()
    save_checkpoint(trainer, tmp_path, 4, {}, keep=1)  # as the next learner does
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000004"]


def test_a_checkpoint_that_cannot_be_written_is_none(tmp_path, held_writer):
    trainer = trainer_of(tiny_model())
    pending = start_checkpoint(trainer, tmp_path, 1, {}, keep=2)
    [temporary] = tmp_path.glob(".tmp-*")
    shutil.rmtree(temporary)
    held_writer.set()
    with pytest.raises(
        StorageError, match=r"cannot write checkpoint .*step_00000001: rank 0: .*No such file"
    ):
        pending.finish()
    assert latest_checkpoint(tmp_path) is None
    save_checkpoint(trainer, tmp_path, 2, {}, keep=2)
    load_checkpoint(trainer, latest_checkpoint(tmp_path))


def test_a_flipped_bit_is_found(untrained, tmp_path):
    directory = shutil.copytree(untrained, tmp_path / untrained.name)
    file = directory / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(StorageError, match=r"is damaged: the bytes of __0_0\.distcp are not those"):
        load_checkpoint(trainer_of(tiny_model()), directory)


def test_a_checkpoint_with_other_weights_frozen_is_refused(tmp_path):
    frozen = trainer_of(tiny_model(), trainable=TrainableWeights(freeze=("embed_tokens",)))
    train(frozen, range(2))
    save_checkpoint(frozen, tmp_path, 2, {}, keep=2)
    again = trainer_of(tiny_model(seed=1), trainable=TrainableWeights(freeze=("embed_tokens",)))
    load_checkpoint(again, latest_checkpoint(tmp_path))
    assert train(again, range(2, 4)) == train(frozen, range(2, 4))
    with pytest.raises(ConfigError, match=r"with other weights frozen \(1 differ, as embedding"):
        load_checkpoint(trainer_of(tiny_model()), latest_checkpoint(tmp_path))


def test_bfloat16_weights_are_the_float32_main_weights_rounded(tmp_path):
    trainer = trainer_of(tiny_model(), dtype=torch.bfloat16)
    train(trainer, range(3))
    mains = {}
    for part in trainer.optimizer.chained_optimizers:
        for parameter in part.model_param_group_index_map:
            mains[parameter] = part._get_main_param_and_optimizer_states(parameter)["param"]
    assert {main.dtype for main in mains.values()} == {torch.float32}
    assert len(mains) == len(list(trainer.model.parameters()))
    for parameter, main in mains.items():
        assert torch.equal(parameter.flatten(), main.bfloat16())
        assert not torch.equal(parameter.flatten().float(), main)


# --- faults of megatron-core 0.16.1 that learner/backends/megatron/optimizer/optimizer.py repairs ---


def test_stock_loading_shares_one_count_of_updates_and_ours_does_not():
    trainer = trainer_of(tiny_model())
    train(trainer, range(2))
    [part] = trainer.optimizer.chained_optimizers
    part.load_state_dict(part.state_dict())
    assert len({id(values["step"]) for values in part.optimizer.state.values()}) == 1
    load_optimizer_state(trainer.optimizer, part.state_dict())
    steps = [values["step"] for values in part.optimizer.state.values()]
    assert len({id(step) for step in steps}) == len(steps) > 10
    assert {float(step) for step in steps} == {2.0}


@pytest.mark.slow
def test_with_the_stock_loader_a_resumed_run_departs(tmp_path, monkeypatch):
    uninterrupted = train(trainer_of(tiny_model()), range(6))
    first = trainer_of(tiny_model())
    train(first, range(3))
    save_checkpoint(first, tmp_path, 3, {}, keep=2)
    monkeypatch.setattr(
        "learner.backends.megatron.checkpoint_state.load_optimizer_state",
        lambda optimizer, state: optimizer.load_state_dict(state),
    )
    stock = trainer_of(tiny_model(seed=1))
    with torch.no_grad():
        load_checkpoint(stock, latest_checkpoint(tmp_path))
    losses = [result.loss for result in train(stock, range(3, 6))]
    assert losses != pytest.approx([result.loss for result in uninterrupted[3:]], abs=1e-4)


def test_another_kind_of_optimizer_state_is_refused(untrained):
    plain = trainer_of(tiny_model(), parallel=ParallelConfig(distributed_optimizer=False))
    with pytest.raises(ConfigError, match="distributed_optimizer=True: set that again"):
        load_checkpoint(plain, untrained)
