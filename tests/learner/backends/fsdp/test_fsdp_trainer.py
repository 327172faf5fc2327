"""This backend beside Megatron, on a family that both have."""

import json
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bus.errors import ConfigError
from learner.backends.fsdp.optimizer import ShardedOptimizer
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.model_loading import load_hf_directory
from learner.backends.shared.trainable import TrainableWeights
from learner.checkpoint.commit import load_checkpoint, save_checkpoint
from learner.config.loss import SFTLoss
from learner.config.parallel import ParallelConfig
from learner.data.packing import pack
from storage.disk.checkpoints import latest
from tests.learner.backends.fsdp.families import family_model
from tests.learner.backends.fsdp.fsdp_steps import BACKENDS, LENGTHS, OPTIMIZER, trained
from tests.learner.tiny import TIS, hf_state, random_samples, tiny_model


def steps_of(backend: str, family: str):
    """Return what of `trained` goes to another process."""
    steps, weights, _ = trained(backend, family)
    return steps, {name: tensor.numpy() for name, tensor in weights.items()}


def assert_same(ours, theirs, tolerance: float = 1e-5):
    (our_steps, our_weights), (their_steps, their_weights) = ours, theirs
    for found, expected in zip(our_steps, their_steps, strict=True):
        assert found == pytest.approx(expected, abs=tolerance)
    assert our_weights.keys() == their_weights.keys()
    for name, weight in their_weights.items():
        assert np.abs(our_weights[name] - weight).max() < tolerance, name


def test_each_step_is_megatrons():
    assert_same(steps_of("fsdp", "qwen3"), steps_of("megatron", "qwen3"))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_that_are_not_finite_are_refused_by_name(backend: str, value: float):
    model = tiny_model("qwen3")
    state = hf_state(model)
    state["model.layers.1.mlp.down_proj.weight"][3, 5] = value
    with pytest.raises(
        ConfigError, match=r"^the model: 1 weights hold NaN.* \S*layers\.1\.mlp\.down_proj\S*: download"
    ):
        BACKENDS[backend](model.config, state, OPTIMIZER)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_each_step_of_two_ranks_is_megatrons(worlds, family):
    ours, theirs = (worlds.run(2, steps_of, backend, family)[0] for backend in ("fsdp", "megatron"))
    assert_same(ours, theirs)


def steps_and_weights_of_a_checkpoint(root: Path):
    """Return two steps of a model in which 4 sinks are fewer rows than ranks need, and what was saved."""
    model = family_model("gpt_oss")
    trainer = FsdpTrainer(model.config, hf_state(model), OPTIMIZER)
    steps = []
    for step in range(2):
        samples = random_samples(LENGTHS, seed=step)[dist.get_rank() :: dist.get_world_size()]
        result = trainer.train_step(pack(samples, 56), TIS, policy_version=3)
        steps.append((result.loss, result.grad_norm))
    save_checkpoint(trainer, root, 2, {}, keep=1)
    restored = FsdpTrainer(model.config, hf_state(model), OPTIMIZER)
    load_checkpoint(restored, latest(root))
    return steps, [{name: t.numpy() for name, t in each.export().items()} for each in (trainer, restored)]


@pytest.mark.slow
def test_a_rank_without_a_row_of_a_tensor_takes_part(worlds, tmp_path):
    steps, (weights, restored) = worlds.run(3, steps_and_weights_of_a_checkpoint, tmp_path / "three")[0]
    alone, (expected, _) = steps_and_weights_of_a_checkpoint(tmp_path / "one")
    assert_same((steps, weights), (alone, expected))
    assert all((restored[name] == weight).all() for name, weight in weights.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"parallel": ParallelConfig(recompute="full")}, {}], ids=["recomputed", "offloaded"]
)
def test_memory_is_saved_without_other_results(settings, monkeypatch):
    steps, weights, _ = trained("fsdp", "qwen3")
    if not settings:
        monkeypatch.setitem(globals(), "OPTIMIZER", OPTIMIZER.model_copy(update={"offload": 1.0}))
    found, saved, _ = trained("fsdp", "qwen3", **settings)
    assert found == steps
    assert all(torch.equal(saved[name], weight) for name, weight in weights.items())


def test_a_pass_scores_as_megatron_does_and_another_policy_lends_its_weights():
    model, other = tiny_model(), tiny_model(seed=1)
    trainers = [kind(model.config, hf_state(model), OPTIMIZER) for kind in BACKENDS.values()]
    packs = pack(random_samples(LENGTHS, temperatures=0.8), 56)
    for trainer in trainers:
        trainer.frozen.load("other", other.config, hf_state(other), "elsewhere")
    own, of_other = [], []
    for trainer in trainers:
        own.append(torch.cat(trainer.logprobs(packs), 1))
        with trainer.frozen.in_place("other"):
            of_other.append(torch.cat(trainer.top_tokens(packs, 3), 1))
        again = torch.cat(trainer.logprobs(packs), 1)
        assert torch.allclose(again, own[-1], rtol=0, atol=0, equal_nan=True)
    for megatron, fsdp in (own, of_other):
        assert torch.allclose(megatron, fsdp, atol=1e-5, equal_nan=True)


def test_an_optimizer_is_freed_before_the_next_is_made(monkeypatch: pytest.MonkeyPatch):
    _, _, trainer = trained("fsdp", "qwen3", steps=1)
    held = [weakref.ref(mine) for _, mine in trainer.optimizer.moments().values()]

    def made(*parts: object) -> ShardedOptimizer:
        assert {one() for one in held} == {None}
        return ShardedOptimizer(*parts)

    monkeypatch.setattr("learner.backends.fsdp.trainer.ShardedOptimizer", made)
    trainer.set_optimizer(OPTIMIZER)
    assert len(trainer.optimizer.moments()) == len(held)


@pytest.mark.slow
def test_frozen_weights_stay_as_they_are():
    frozen = TrainableWeights(train_only=(r"layers\.1\.", r"lm_head"))
    before = hf_state(tiny_model("qwen3_moe"))
    _, after, _ = trained("fsdp", "qwen3_moe", 2, trainable=frozen)
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert changed
    assert all(".layers.1." in name or "lm_head" in name for name in changed)
    with pytest.raises(ConfigError, match="in the model they are one tensor"):
        trained("fsdp", "qwen3_moe", 0, trainable=TrainableWeights(freeze=(r"experts\.0\.up_proj",)))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_a_checkpoint_is_a_model_directory_of_the_weights(tmp_path, family):
    _, weights, trainer = trained("fsdp", family, 1)
    save_checkpoint(trainer, tmp_path, 1, {}, keep=1)
    _, state = load_hf_directory(latest(tmp_path))
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[name], weight) for name, weight in weights.items())


def test_a_checkpoint_is_loaded_by_a_transformers_with_more_hyperparameters(tmp_path):
    _, _, trainer = trained("fsdp", "qwen3", 0)
    save_checkpoint(trainer, tmp_path, 1, {}, keep=1)
    manifest = latest(tmp_path) / "manifest.json"
    written = json.loads(manifest.read_text())
    del written["model"]["attention_bias"]
    manifest.write_text(json.dumps(written))
    load_checkpoint(trainer, latest(tmp_path))
    config = latest(tmp_path) / "config.json"
    config.write_text(config.read_text().replace('"attention_bias": false', '"attention_bias": true '))
    with pytest.raises(ConfigError, match="of another model: attention_bias is True, not False"):
        load_checkpoint(trainer, latest(tmp_path), verified=True)


@pytest.mark.slow
def test_a_checkpoint_of_the_other_backend_is_refused_and_named(tmp_path):
    for backend, other in (("fsdp", "megatron"), ("megatron", "fsdp")):
        _, _, trainer = trained(backend, "qwen3", 0)
        save_checkpoint(trainer, tmp_path / backend, 1, {}, keep=1)
        _, _, elsewhere = trained(other, "qwen3", 0)
        with pytest.raises(ConfigError, match=f"learner.backend={backend}, not {other}: set that again"):
            load_checkpoint(elsewhere, latest(tmp_path / backend))


@pytest.mark.slow
def test_bfloat16_is_published_as_it_is_computed_with():
    _, weights, trainer = trained("fsdp", "qwen3", 1, dtype=torch.bfloat16)
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    exported = trainer.exported()
    rest = dict(exported.rest())
    assert exported.shapes.keys() == exported.here.keys() | rest.keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in rest.items())
    samples = random_samples(LENGTHS)
    losses = [trainer.train_step(pack(samples, 100), SFTLoss(), policy_version=0).loss for _ in range(4)]
    assert losses[-1] < losses[0]
