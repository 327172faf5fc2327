import pytest
import torch
from pydantic import ValidationError
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR

from launch.settings.run_config import RunConfig, resolve
from learner.backends.update.decision import learning_rate
from learner.config.optimizer import ConstantSchedule, CosineSchedule, OptimizerConfig, WSDSchedule


def torch_rates(after_warmup, updates, *, lr, warmup):
    """The rates of torch's schedulers, one after the other; `after_warmup` makes [(scheduler, its steps)]."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    parts = [(LinearLR(optimizer, 1 / warmup, total_iters=warmup - 1), warmup - 1)] if warmup > 1 else []
    parts += after_warmup(optimizer)
    ends = [sum(steps for _, steps in parts[: n + 1]) for n in range(len(parts) - 1)]
    scheduler = SequentialLR(optimizer, [part for part, _ in parts], milestones=ends)
    rates = []
    for _ in range(updates):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def ours(config, updates):
    return [learning_rate(config, update) for update in range(1, updates + 1)]


@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_cosine_is_that_of_torch(warmup):
    def after(optimizer):
        return [
            (CosineAnnealingLR(optimizer, 10, eta_min=1e-4), 10),
            (ConstantLR(optimizer, 0.1, 10**6), 10**6),
        ]

    config = OptimizerConfig(
        lr=1e-3, warmup_steps=warmup, schedule=CosineSchedule(decay_steps=10, min_lr=1e-4)
    )
    assert ours(config, 20) == pytest.approx(torch_rates(after, 20, lr=1e-3, warmup=warmup))


@pytest.mark.parametrize("warmup", [0, 4])
def test_wsd_is_that_of_torch(warmup):
    def after(optimizer):
        return [(ConstantLR(optimizer, 1.0, 5), 5), (LinearLR(optimizer, 1.0, 0.1, total_iters=8), 10**6)]

    schedule = WSDSchedule(stable_steps=5, decay_steps=8, min_lr=1e-4, decay="linear")
    config = OptimizerConfig(lr=1e-3, warmup_steps=warmup, schedule=schedule)
    assert ours(config, 24) == pytest.approx(torch_rates(after, 24, lr=1e-3, warmup=warmup))


def test_the_fall_of_wsd_is_one_minus_the_root_unless_said_otherwise():
    config = OptimizerConfig(lr=1e-3, schedule=WSDSchedule(stable_steps=2, decay_steps=16))
    assert ours(config, 20)[:3] == [1e-3] * 3
    assert ours(config, 20)[3:8:4] == pytest.approx([1e-3 * (1 - 0.25), 1e-3 * (1 - 0.3125**0.5)])
    assert ours(config, 30)[18:] == pytest.approx([0.0] * 12)


def test_a_constant_rate_follows_the_warm_up():
    config = OptimizerConfig(lr=2.0, warmup_steps=4)
    assert ours(config, 7) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0]
    assert ours(config, 7) == pytest.approx(
        torch_rates(lambda o: [(LambdaLR(o, lambda _: 1.0), 100)], 7, lr=2.0, warmup=4)
    )


def test_a_schedule_that_rises_is_refused():
    with pytest.raises(ValidationError, match=r"min_lr=0\.1 is above lr=0\.001"):
        OptimizerConfig(lr=1e-3, schedule=CosineSchedule(min_lr=0.1))


def test_flags_change_the_schedule_over_the_defaults():
    flags = {"learner": {"optimizer": {"schedule": {"type": "cosine", "decay_steps": 7}}}}
    assert resolve(flags).learner.optimizer.schedule == CosineSchedule(decay_steps=7)
    assert RunConfig().learner.optimizer.schedule == ConstantSchedule()
