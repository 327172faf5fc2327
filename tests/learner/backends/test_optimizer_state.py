import gc
import weakref

import pytest
import torch
from pydantic import ValidationError
from torch.utils._python_dispatch import TorchDispatchMode

from bus.process.process_tuning import few_collections
from learner.backends.megatron.optimizer.optimizer import _prime
from learner.backends.megatron.trainer import Trainer
from learner.backends.update.bf16_adamw import MOMENTS, BFloat16StateAdamW
from learner.checkpoint.commit import load_checkpoint, save_checkpoint
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import pack
from storage.disk.checkpoints import latest as latest_checkpoint
from tests.learner.tiny import TIS, hf_state, random_samples, tiny_model

OPTIMIZER = OptimizerConfig(lr=1e-3, warmup_steps=2, weight_decay=0.1, state_dtype="bfloat16")


def trainer_of(seed=0, optimizer=OPTIMIZER, **settings):
    model = tiny_model(seed=seed)
    return Trainer(model.config, hf_state(model), optimizer, **settings)


def train(trainer, steps):
    return [
        trainer.train_step(pack(random_samples([5, 17, 2, 32, 9], seed=step), 40), TIS, policy_version=3)
        for step in steps
    ]


def moments(trainer):
    return [
        values[name]
        for part in trainer.optimizer.chained_optimizers
        for values in part.optimizer.state.values()
        for name in ("exp_avg", "exp_avg_sq")
    ]


def test_an_update_is_that_of_torch_from_rounded_moments():
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.arange(50.0)) for _ in range(2))
    settings = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizer, reference = BFloat16StateAdamW([ours], **settings), torch.optim.AdamW([theirs], **settings)
    zeros = {name: torch.zeros(50, dtype=torch.bfloat16) for name in ("exp_avg", "exp_avg_sq")}
    optimizer.state[ours] = {"step": torch.tensor(0.0), **zeros}
    for _ in range(5):
        ours.grad = torch.randn(50)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)
        for name in ("exp_avg", "exp_avg_sq"):
            reference.state[theirs][name].copy_(reference.state[theirs][name].bfloat16())
            assert torch.equal(optimizer.state[ours][name].float(), reference.state[theirs][name])


class Made(TorchDispatchMode):
    """Notes what is as large as the weights, and in float32."""

    def __init__(self):
        super().__init__()
        self.wide = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype == torch.float32 and made.numel() == 50:
            self.wide.append(func)
        return made


def test_neither_the_beginning_nor_a_resume_needs_room_for_float32_moments():
    saved = BFloat16StateAdamW([torch.nn.Parameter(torch.arange(50.0))])
    resumed = BFloat16StateAdamW([torch.nn.Parameter(torch.zeros(50))])
    with Made() as made:
        _prime(saved)
        state = saved.state_dict()
        for name in ("exp_avg", "exp_avg_sq"):
            state["state"][0][name].fill_(3.5)
        resumed.load_state_dict(state)
    assert made.wide == []
    [values] = resumed.state.values()
    assert all(torch.equal(values[name], torch.full((50,), 3.5, dtype=torch.bfloat16)) for name in MOMENTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_moments_are_and_stay_bfloat16_and_the_main_weights_float32(dtype):
    trainer = trainer_of(dtype=dtype)
    train(trainer, range(2))
    assert {moment.dtype for moment in moments(trainer)} == {torch.bfloat16}
    assert any(moment.any() for moment in moments(trainer))
    mains = {p.dtype for group in trainer.optimizer.param_groups for p in group["params"]}
    assert mains == {torch.float32}


@pytest.mark.slow
def test_training_stays_close_to_that_with_float32_moments():
    exact = train(trainer_of(optimizer=OPTIMIZER.model_copy(update={"state_dtype": "float32"})), range(6))
    rounded = train(trainer_of(), range(6))
    losses = [[result.loss for result in results] for results in (rounded, exact)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], abs=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path, dtype):
    uninterrupted = train(trainer_of(dtype=dtype), range(6))
    first = trainer_of(dtype=dtype)
    train(first, range(3))
    save_checkpoint(first, tmp_path, 3, {}, keep=1)
    second = trainer_of(seed=1, dtype=dtype)
    load_checkpoint(second, latest_checkpoint(tmp_path))
    assert {moment.dtype for moment in moments(second)} == {torch.bfloat16}
    for resumed, expected in zip(train(second, range(3, 6)), uninterrupted[3:], strict=True):
        assert resumed.loss == pytest.approx(expected.loss, abs=1e-5)
        assert resumed.grad_norm == pytest.approx(expected.grad_norm, abs=1e-5)


def test_moments_that_rounding_would_hold_still_are_refused():
    with pytest.raises(ValidationError, match=r"needs beta2 <= 0\.99 \(it is 0\.999\)"):
        OptimizerConfig(beta2=0.999, state_dtype="bfloat16")


@pytest.mark.usefixtures("unfrozen")
def test_an_optimizer_is_freed_before_the_next_though_garbage_is_left_alone():
    trainer = trainer_of()
    with few_collections():
        held = [weakref.ref(tensor) for tensor in moments(trainer)]
        held += [weakref.ref(part.optimizer) for part in trainer.optimizer.chained_optimizers]
        trainer.set_optimizer(OPTIMIZER)
        assert {one() for one in held} == {None}
        assert gc.get_freeze_count() > 0
    train(trainer, range(2))
