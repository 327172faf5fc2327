import pytest
import torch

from bus.errors import ConfigError, StorageError
from learner.checkpoint import latest_checkpoint, load_checkpoint, read_extra, save_checkpoint
from learner.config import OptimizerConfig, ParallelConfig, TISLoss
from learner.packing import pack
from learner.trainer import Trainer
from tests.learner.tiny import hf_state, random_samples, tiny_model

OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=5, weight_decay=0.1)


def trainer_of(model, **settings):
    return Trainer(model.config, hf_state(model), OPTIMIZER, **settings)


def train(trainer, steps):
    results = []
    for step in steps:
        batches = pack(random_samples([5, 17, 2, 32, 9], seed=step), 40)
        results.append(trainer.train_step(batches, TISLoss(), temperature=1.0, policy_version=3))
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path, dtype):
    uninterrupted = train(trainer_of(tiny_model(), dtype=dtype), range(6))
    first = trainer_of(tiny_model(), dtype=dtype)
    train(first, range(3))
    save_checkpoint(first, tmp_path, 3, {"policy_version": 7}, keep=2)

    second = trainer_of(tiny_model(seed=1), dtype=dtype)
    train(second, range(10, 12))  # its own optimizer state must not survive
    assert load_checkpoint(second, latest_checkpoint(tmp_path)) == {"policy_version": 7}
    assert (second.steps_done, second.updates_done) == (3, 3)
    for resumed, expected in zip(train(second, range(3, 6)), uninterrupted[3:], strict=True):
        assert resumed.loss == pytest.approx(expected.loss, abs=1e-5)
        assert resumed.grad_norm == pytest.approx(expected.grad_norm, abs=1e-5)
        assert resumed.lr == expected.lr


def test_a_checkpoint_before_the_first_step_resumes(tmp_path):
    save_checkpoint(trainer_of(tiny_model()), tmp_path, 0, {}, keep=1)
    resumed = trainer_of(tiny_model(seed=1))
    load_checkpoint(resumed, latest_checkpoint(tmp_path))
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
        patched.setattr("learner.checkpoint._write_manifest", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            save_checkpoint(trainer, tmp_path, 2, {}, keep=2)
    assert read_extra(latest_checkpoint(tmp_path)) == {}
    save_checkpoint(trainer, tmp_path, 3, {}, keep=2)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("name", ["__0_0.distcp", "common.pt", ".metadata"])
def test_a_torn_checkpoint_is_refused(tmp_path, name):
    trainer = trainer_of(tiny_model())
    save_checkpoint(trainer, tmp_path, 1, {}, keep=2)
    directory = latest_checkpoint(tmp_path)
    torn = directory / name
    torn.write_bytes(torn.read_bytes()[:-10])
    with pytest.raises(StorageError, match="is torn"):
        load_checkpoint(trainer, directory)


def test_a_checkpoint_without_manifest_is_refused(tmp_path):
    with pytest.raises(StorageError, match="not a whole checkpoint"):
        load_checkpoint(trainer_of(tiny_model()), tmp_path)


def test_a_checkpoint_of_another_model_is_refused_with_the_differences(tmp_path):
    save_checkpoint(trainer_of(tiny_model("qwen3")), tmp_path, 1, {}, keep=2)
    with pytest.raises(ConfigError, match=r"model_type is qwen3, not llama, .*head_dim is 24, not 16"):
        load_checkpoint(trainer_of(tiny_model("llama")), latest_checkpoint(tmp_path))


def test_another_kind_of_optimizer_state_is_refused(tmp_path):
    save_checkpoint(trainer_of(tiny_model()), tmp_path, 1, {}, keep=1)
    plain = trainer_of(tiny_model(), parallel=ParallelConfig(distributed_optimizer=False))
    with pytest.raises(ConfigError, match="distributed_optimizer=True: set that again"):
        load_checkpoint(plain, latest_checkpoint(tmp_path))
