"""Hooks that read and change the weights, on both backends and on several ranks."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bus.errors import ConfigError
from learner.algorithms.hooks import figures_after_step
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.megatron.trainer import Trainer
from learner.checkpoint.commit import load_checkpoint, save_checkpoint
from learner.config.learner import LearnerConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.config.plugin import HookConfig
from learner.step.rl_step import train_on
from storage.disk.checkpoints import latest
from tests.factories import make_trajectory
from tests.learner.division import divide_world
from tests.learner.tiny import VOCAB, hf_state, tiny_model

BACKENDS = {"megatron": Trainer, "fsdp": FsdpTrainer}
MUCH = 0.5
kept: dict[str, torch.Tensor] = {}


def hook(function, **settings: object) -> HookConfig:
    return HookConfig(function=f"{__name__}:{function.__name__}", settings=settings)


def raise_all(step, groups, optimizer, *, model, by: float):
    """Add the same to every weight, and let the optimizer change nothing."""
    for part in model.values():
        part += by
    return optimizer.model_copy(update={"lr": 0.0})


def raise_after(step, model, *, by: float):
    for part in model.values():
        part += by


def freeze(step, model, *, layer: str):
    """Put a layer's weights back, and tell the norm of all weights."""
    for name, part in model.items():
        if layer in name:
            part.copy_(kept.setdefault(name, part.clone()))
    squares = torch.stack([part.double().square().sum() for part in model.values()]).sum()
    if dist.get_world_size() > 1:
        dist.all_reduce(squares)
    return {"norm": float(squares.sqrt())}


def tell_text(step, model):
    return {"norm": "large"}


def fail(step, model):
    return {"norm": model["nothing"]}


def trained(
    backend: str, dtype: str, hooks: dict[str, HookConfig], steps: int = 2, saved: Path | None = None,
    **parallel: object,
):  # fmt: skip
    """Return the weights before and after, and the figures of each step.

    With a directory, the steps are those of a run that was `saved` there and is taken up."""
    kept.clear()
    model, layout = tiny_model(seed=0), ParallelConfig(**parallel)
    divide_world(layout)
    build = partial(
        BACKENDS[backend], model.config, hf_state(model), OptimizerConfig(lr=1e-2),
        dtype=getattr(torch, dtype), parallel=layout,
    )  # fmt: skip
    made = build()
    if saved is not None:
        save_checkpoint(made, saved, 1, {}, keep=1)
        made = build()
        load_checkpoint(made, latest(saved))
    before, figures = made.export(), []
    groups = [
        [make_trajectory(2 * n + dist.get_rank(), k, group_size=2, reward=float(k)) for k in range(2)]
        for n in range(2)
    ]
    for group in groups:
        for trajectory in group:
            trajectory.token_ids[:] %= VOCAB
    learner = LearnerConfig(optimizer=OptimizerConfig(lr=1e-2), **hooks)
    for step in range(1, steps + 1):
        _, result = train_on(made, groups, [1.0] * len(groups), learner, step=step, policy_version=step - 1)
        figures.append(result.diagnostics.get("own_norm"))
    numbers = [{n: w.float().numpy() for n, w in weights.items()} for weights in (before, made.export())]
    return *numbers, figures


def assert_raised(before, after, by: float, atol: float) -> None:
    assert before.keys() == after.keys()
    for name, weight in before.items():
        np.testing.assert_allclose(after[name], weight + by, rtol=0.01, atol=atol, err_msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_added_before_a_step_is_in_the_weights_after_it(backend):
    before, after, _ = trained(backend, "float32", {"before_step": hook(raise_all, by=MUCH)})
    assert_raised(before, after, 2 * MUCH, 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_that_is_taken_up_lends_its_weights_too(backend, tmp_path):
    hooks = {"before_step": hook(raise_all, by=MUCH), "after_step": hook(raise_after, by=MUCH)}
    before, after, _ = trained(backend, "float32", hooks, saved=tmp_path)
    assert_raised(before, after, 4 * MUCH, 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_changes_too_small_for_the_dtype_of_the_model_add_up(backend):
    small = 2.0**-9  # of weights near 1, which bfloat16 rounds to steps of 2^-7
    before, after, _ = trained(backend, "bfloat16", {"before_step": hook(raise_all, by=small)}, steps=8)
    norms = [name for name in before if "layernorm" in name]
    for name in norms:
        assert np.abs(after[name] - before[name] - 8 * small).max() <= 2.0**-7, name
    assert norms


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_that_is_put_back_after_each_step_is_frozen(backend, dtype):
    layer = "layers.1."
    before, after, norms = trained(backend, dtype, {"after_step": hook(freeze, layer=layer)}, steps=3)
    first = trained(backend, dtype, {"after_step": hook(freeze, layer=layer)}, steps=1)[1]
    for name, weight in after.items():
        same = (weight == first[name]).all()  # the hook has kept what it was after the first step
        assert same == (layer in name), name
    assert before.keys() == after.keys()
    squares = sum(float(np.square(weight.astype(float)).sum()) for weight in after.values())
    assert norms[-1] == pytest.approx(squares**0.5, rel=1e-5 if dtype == "float32" else 1e-2)


def of_rank(backend: str, parallel: dict[str, object]):
    hooks = {"before_step": hook(raise_all, by=MUCH), "after_step": hook(raise_after, by=MUCH)}
    return trained(backend, "bfloat16", hooks, **parallel)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "parallel"),
    [
        ("fsdp", {}), ("megatron", {}), ("megatron", {"distributed_optimizer": False}),
        ("megatron", {"tensor": 2}), ("megatron", {"pipeline": 2}),
        ("megatron", {"overlap_param_gather": True, "overlap_grad_reduce": True}),
    ],
)  # fmt: skip
def test_parts_of_all_ranks_make_up_the_weights(worlds, backend, parallel):
    before, after, _ = worlds.run(2, of_rank, backend, parallel)[0]
    assert_raised(before, after, 4 * MUCH, 0.02)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (tell_text, r"tell_text' returned .*return numbers by name"),
        (fail, r"(?s)learner\.after_step '.*:fail' raised KeyError.*test_lent_weights\.py.*in fail"),
    ],
)
def test_what_a_hook_must_not_do_is_told_with_its_name(function, said):
    with pytest.raises(ConfigError, match=said):
        trained("fsdp", "float32", {"after_step": hook(function)}, steps=1)


def test_weights_on_the_host_are_not_lent():
    model = tiny_model()
    divide_world(ParallelConfig())
    optimizer = OptimizerConfig(offload=1.0)
    made = Trainer(model.config, hf_state(model), optimizer)
    with pytest.raises(ConfigError, match=r"learner\.optimizer\.offload=1\.0 keeps weights on the host"):
        figures_after_step(1, LearnerConfig(after_step=hook(fail)), made.lent_weights)
