"""Muon updates the matrices of layers as its papers say, on any layout of ranks; AdamW updates the rest."""

import dataclasses
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from pydantic import ValidationError

from bus.errors import ConfigError
from learner.backends.contract.backend import Backend
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.megatron.trainer import Trainer
from learner.backends.shared.trainable import TrainableWeights
from learner.backends.update import matrix_exchange
from learner.backends.update.matrix_exchange import MatrixExchange, Piece
from learner.backends.update.muon import MOMENTUM, SECOND, muon_steps
from learner.checkpoint.commit import load_checkpoint, save_checkpoint
from learner.config.learner import LearnerConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.data.packing import pack
from storage.disk.checkpoints import latest
from tests.learner.backends.asked_questions import Questions
from tests.learner.backends.fsdp.families import family_config
from tests.learner.division import divide_world
from tests.learner.muon_reference import ReferenceMuon, expected_step
from tests.learner.reference import reference_step
from tests.learner.tiny import SIZES, TIS, hf_state, random_samples, tiny_model

pytestmark = pytest.mark.slow

LENGTHS = [5, 17, 2, 32, 9, 20, 20, 3]
OPTIMIZER = OptimizerConfig(matrices="muon", lr=1e-2, warmup_steps=2, weight_decay=0.1, eps=1e-4)
PLAIN = {"distributed_optimizer": False}
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True}
STEPS = 2


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4), (1, 6)])
def test_a_step_has_the_singular_vectors_of_the_momentum_and_its_values_near_one(shape):
    torch.manual_seed(0)
    momenta = torch.randn(2, *shape)
    for ours, momentum in zip(muon_steps(momenta, torch.float32), momenta, strict=True):
        assert torch.allclose(ours.double(), expected_step(momentum), atol=2e-6)


def test_a_step_worked_by_hand():
    # of a multiple of the unit matrix, both singular values are sqrt(1/2) of the norm, and stay equal
    value = math.sqrt(0.5)
    for _ in range(5):
        value = 3.4445 * value - 4.7750 * value**3 + 2.0315 * value**5
    [step] = muon_steps(7 * torch.eye(2)[None], torch.float32)
    assert torch.allclose(step, 0.2 * math.sqrt(2) * value * torch.eye(2), atol=1e-6)
    assert 0.6 < value < 1.3


def test_a_step_in_bfloat16_is_near_and_that_of_a_matrix_of_zeros_is_none():
    torch.manual_seed(0)
    momenta = torch.randn(1, 40, 24)
    rough, exact = (muon_steps(momenta, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert 0 < (rough - exact).norm() / exact.norm() < 0.05
    assert not muon_steps(torch.zeros(1, 4, 3), torch.float32).any()


def test_a_step_is_that_of_torch_where_torch_computes_in_bfloat16():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(24, 40))
    weight.grad = torch.randn(24, 40)
    before = weight.detach().clone()
    theirs = torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    theirs.step()
    [ours] = muon_steps(weight.grad[None], torch.bfloat16)
    assert (before - weight - ours).norm() < 0.02 * ours.norm()


def train(
    layout: dict[str, object], model_changes: dict[str, object], backend: type[Backend] = Trainer,
    dtype: torch.dtype = torch.float32,
):  # fmt: skip
    """Return loss and norm of each step, and the weights then; on a rank of a world."""
    parallel = ParallelConfig(**layout)
    divide_world(parallel)
    model = tiny_model(**model_changes)
    trainer = backend(model.config, hf_state(model), OPTIMIZER, parallel=parallel, dtype=dtype)
    rank, ranks = trainer.data_parallel_group.rank(), trainer.data_parallel_group.size()
    results = []
    for step in range(STEPS):
        samples = random_samples(LENGTHS, seed=step)[rank::ranks]
        result = trainer.train_step(pack(samples, 56), TIS, policy_version=3)
        results.append((result.loss, result.grad_norm))
    return results, trainer.export()


@cache
def reference(model_changes: tuple[tuple[str, object], ...]):
    """Return what `train` should return, computed without any of Sluice's code."""
    policy = tiny_model(**dict(model_changes))
    optimizer = ReferenceMuon(policy, OPTIMIZER)
    steps = [
        reference_step(
            policy, optimizer, random_samples(LENGTHS, seed=step),
            loss="tis", lr=OPTIMIZER.lr * min(1, (step + 1) / 2),
        )
        for step in range(STEPS)
    ]  # fmt: skip
    return steps, hf_state(policy)


def assert_follows_the_reference(steps, weights, model_changes):
    expected_steps, expected = reference(tuple(model_changes.items()))
    for found, wanted in zip(steps, expected_steps, strict=True):
        assert found == pytest.approx(wanted, abs=2e-5)
    for name, weight in weights.items():
        assert (weight - expected[name]).abs().max() < 1e-5, name


MOE = {"family": "qwen3_moe"}
LAYOUTS = {
    "dp2": (2, {}, {}),
    "dp2 plain": (2, PLAIN, {}),
    "dp2 overlapped": (2, OVERLAPPED, {}),
    "tp2": (2, {"tensor": 2, "sequence": True}, {"family": "qwen2"}),
    "tp2 plain": (2, PLAIN | {"tensor": 2}, {}),
    "tp2 of one key-value head": (2, {"tensor": 2}, {"num_key_value_heads": 1}),
    "pp2 vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2}, {"num_hidden_layers": 4}),
    "cp2": (2, {"context": 2}, {}),
    "ep2": (2, {"expert": 2}, MOE),
    "tp2 ep2 glm": (2, {"tensor": 2, "sequence": True, "expert": 2}, {"family": "glm4_moe"}),
    "tp2 ep2 deepseek": (2, {"tensor": 2, "sequence": True, "expert": 2}, {"family": "deepseek_v3"}),
    "tp2 ep2 gpt-oss": (2, {"tensor": 2, "sequence": True, "expert": 2}, {"family": "gpt_oss"}),
    "tp2 plain deepseek": (2, PLAIN | {"tensor": 2, "sequence": True}, {"family": "deepseek_v3"}),
    "tp2 etp2 shared": (
        2, {"tensor": 2, "sequence": True, "expert_tensor": 2}, {"family": "qwen2_moe"},
    ),
    "tp2 ep2 plain": (2, PLAIN | {"tensor": 2, "sequence": True, "expert": 2}, MOE),
    "dp2 tp2 overlapped": (4, {"tensor": 2, "sequence": True} | OVERLAPPED, {}),
    "dp2 pp2 moe": (4, {"pipeline": 2}, {"family": "glm4_moe"}),
}  # fmt: skip
"""Ranks, `learner.parallel` and changes of the model; in the last, only the second stage has experts."""


NIGHTLY = ("dp2", "tp2 plain", "tp2 ep2 glm", "tp2 ep2 plain", "ep2")
"""Layouts of two ranks whose parts other layouts have too."""


def marked(name: str) -> object:
    nightly = LAYOUTS[name][0] > 2 or name in NIGHTLY
    return pytest.param(name, marks=pytest.mark.nightly) if nightly else name


def test_steps_follow_the_papers_on_one_rank():
    steps, weights = train({}, {})
    assert_follows_the_reference(steps, weights, {})


@pytest.mark.first(3, others=pytest.mark.nightly)
@pytest.mark.parametrize("name", [marked(name) for name in LAYOUTS])
def test_steps_follow_the_papers_on_any_layout(worlds, name):
    ranks, layout, model_changes = LAYOUTS[name]
    answers = worlds.run(ranks, train, layout, model_changes)
    assert all(steps == answers[0][0] for steps, _ in answers)
    assert_follows_the_reference(*answers[0], model_changes)


def trainer_of(*, seed: int = 0, **settings: object):
    model = tiny_model(seed=seed)
    return Trainer(model.config, hf_state(model), settings.pop("optimizer", OPTIMIZER), **settings)


def step(trainer, samples):
    return trainer.train_step(pack(samples, 56), TIS, policy_version=3)


def states(trainer):
    """Return the state of each parameter that Muon updates, and of each other."""
    [part] = trainer.optimizer.chained_optimizers
    muons = [part.optimizer.state[main] for main in part.optimizer.parts.values()]
    return muons, [state for state in part.optimizer.state.values() if not any(state is m for m in muons)]


@pytest.mark.parametrize("family", ["qwen3", "qwen2_moe"])
def test_steps_of_transformers_own_model_follow_the_papers(family):
    model_changes = {"family": family}
    steps, weights = train({}, model_changes, FsdpTrainer)
    assert_follows_the_reference(steps, weights, model_changes)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_steps_of_three_ranks_with_transformers_model_follow_the_papers(worlds, family):
    answers = worlds.run(3, train, {}, {"family": family}, FsdpTrainer)
    assert_follows_the_reference(*answers[0], {"family": family})


def train_save_and_resume(model_changes: dict[str, object], root: Path):
    """Return the weights after two steps of a run, and after the second of one resumed; on a rank."""
    model = tiny_model(**model_changes)
    first, second = (FsdpTrainer(model.config, hf_state(model), OPTIMIZER) for _ in range(2))
    step(first, random_samples(LENGTHS))
    save_checkpoint(first, root, 1, {}, keep=1)
    load_checkpoint(second, latest(root))
    for trainer in (first, second):
        step(trainer, random_samples(LENGTHS, seed=1))
    return first.export(), second.export()


def test_a_run_of_which_a_rank_has_an_empty_shard_of_a_matrix_is_resumed(worlds, tmp_path):
    # four experts on three ranks: two, two and none
    first, second = worlds.run(3, train_save_and_resume, {"family": "mixtral"}, tmp_path)[0]
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())


def test_the_momentum_of_matrices_is_all_that_is_kept_of_them():
    trainer = trainer_of()
    step(trainer, random_samples(LENGTHS))
    muons, others = states(trainer)
    assert len(muons) == 4 * 2  # tensors of a layer, layers
    assert all(state.keys() == {"step", MOMENTUM} for state in muons)
    assert all(state.keys() == {"step", MOMENTUM, SECOND} for state in others)
    assert all(state[MOMENTUM].any() for state in muons)


def test_the_host_asks_the_device_for_nothing_before_the_step_is_queued():
    trainer = trainer_of()
    with Questions() as questions:
        assert not step(trainer, random_samples(LENGTHS)).skipped
    assert not questions.asked, questions.asked[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_skipped_step_leaves_weights_and_momenta_alone(bad):
    trainer = trainer_of()
    samples = random_samples(LENGTHS)
    step(trainer, samples)
    before = [{name: value.clone() for name, value in state.items()} for state in states(trainer)[0]]
    weights = trainer.export()
    poisoned = dataclasses.replace(samples[0].with_streams(advantages=bad), loss_mask=np.ones(5, bool))
    assert step(trainer, [poisoned]).skipped
    for old, new in zip(before, states(trainer)[0], strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)
    assert all(torch.equal(weights[name], weight) for name, weight in trainer.export().items())


def test_the_momentum_sees_the_clipped_gradient():
    samples = random_samples(LENGTHS)
    clipped, whole = (
        trainer_of(optimizer=OPTIMIZER.model_copy(update={"clip_grad": bound})) for bound in (0.01, math.inf)
    )
    norm = step(whole, samples).grad_norm
    assert step(clipped, samples).grad_norm == norm > 0.01
    for small, large in zip(states(clipped)[0], states(whole)[0], strict=True):
        assert torch.allclose(small[MOMENTUM] * norm / 0.01, large[MOMENTUM], rtol=1e-3, atol=1e-6)


def test_frozen_matrices_stay():
    before = hf_state(tiny_model())
    trainer = trainer_of(trainable=TrainableWeights(train_only=(r"layers\.1\.mlp", "norm")))
    step(trainer, random_samples(LENGTHS))
    changed = {name for name, weight in trainer.export().items() if not torch.equal(weight, before[name])}
    assert {name for name in changed if "norm" not in name} == {
        f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")
    }


@pytest.mark.parametrize("backend", [Trainer, FsdpTrainer])
def test_a_run_that_trains_no_matrix_is_refused(backend):
    model = tiny_model()
    norms = TrainableWeights(train_only=("norm",))
    with pytest.raises(ConfigError, match=r"optimizer\.matrices=muon has no matrix of a layer to train"):
        backend(model.config, hf_state(model), OPTIMIZER, trainable=norms)


def test_a_model_of_transformers_with_trained_weights_that_may_be_matrices_is_refused_and_the_weight_named():
    config = transformers.GPT2Config(vocab_size=58, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    state = hf_state(transformers.GPT2LMHeadModel(config))
    with pytest.raises(ConfigError, match=r"which matrices transformer\.h\.0\.attn\.c_attn\.weight of this"):
        FsdpTrainer(config, state, OPTIMIZER)


def test_in_bfloat16_steps_stay_near_those_in_float32():
    [(rounded, _), (exact, _)] = (train({}, {}, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    assert [loss for loss, _ in rounded] == pytest.approx([loss for loss, _ in exact], abs=0.15)


@pytest.mark.parametrize(
    ("config", "tensor"),
    [
        (family_config("gpt_oss"), "experts.down_proj"),
        (transformers.Phi3Config(**SIZES, pad_token_id=0), "gate_up_proj"),
    ],
    ids=["gpt_oss", "phi3"],
)
def test_matrices_that_files_keep_in_one_tensor_are_refused_and_named(config, tensor):
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=rf"cannot tell the matrices apart that \S+{tensor}"):
        FsdpTrainer(config, hf_state(model), OPTIMIZER)


@pytest.mark.parametrize("layout", [{}, PLAIN], ids=["distributed", "plain"])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, layout):
    def losses(trainer, steps):
        return [
            (r.loss, r.grad_norm) for r in (step(trainer, random_samples(LENGTHS, seed=n)) for n in steps)
        ]

    parallel = ParallelConfig(**layout)
    uninterrupted = losses(trainer_of(parallel=parallel), range(6))
    first = trainer_of(parallel=parallel)
    losses(first, range(3))
    save_checkpoint(first, tmp_path, 3, {}, keep=1)
    second = trainer_of(seed=1, parallel=parallel)
    load_checkpoint(second, latest(tmp_path))
    assert losses(second, range(3, 6)) == uninterrupted[3:]


@pytest.mark.parametrize("backend", [Trainer, FsdpTrainer])
def test_a_checkpoint_of_the_other_optimizer_is_refused_and_no_file_has_a_second_moment(tmp_path, backend):
    model = tiny_model()
    muon, adamw = (
        backend(model.config, hf_state(model), OPTIMIZER.model_copy(update={"matrices": kind}))
        for kind in ("muon", "adamw")
    )
    sizes = {}
    for name, trainer in (("muon", muon), ("adamw", adamw)):
        save_checkpoint(trainer, tmp_path / name, 1, {}, keep=1)
        sizes[name] = sum(file.stat().st_size for file in latest(tmp_path / name).iterdir())
    matrices = sum(
        each.numel() for name, each in hf_state(model).items() if "layers" in name and each.dim() == 2
    )
    assert sizes["adamw"] - sizes["muon"] == pytest.approx(4 * matrices, rel=0.1)
    with pytest.raises(ConfigError, match=r"was trained with optimizer\.matrices=adamw"):
        load_checkpoint(muon, latest(tmp_path / "adamw"))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"momentum": 0.9}, r"momentum=0\.9 has no effect with matrices=adamw"),
        ({"matrices": "muon", "offload": 0.5}, r"offload=0\.5 is for matrices=adamw"),
        ({"matrices": "muon", "state_dtype": "bfloat16"}, "state_dtype=bfloat16 is for matrices=adamw"),
    ],
)
def test_settings_without_effect_or_room_are_refused(settings, why):
    with pytest.raises(ValidationError, match=why):
        OptimizerConfig(**settings)


def test_adapters_are_refused():
    with pytest.raises(ValidationError, match=r"rank=8 with learner\.optimizer\.matrices=muon"):
        LearnerConfig.model_validate({"lora": {"rank": 8}, "optimizer": {"matrices": "muon"}})


def test_an_owner_computes_the_steps_of_so_many_matrices_at_a_time(monkeypatch):
    class Experts:
        """Keeps its matrices like the experts of a layer, and copies of the first two."""

        slice_shapes = ((5, 2, 3),)

        def matrices(self, slices):
            return [each.clone() if number < 2 else each for number, each in enumerate(slices[0])]

        def slices(self, matrices):
            return [torch.stack(matrices)]

    stacks = []

    def doubled(momenta):
        stacks.append(len(momenta))
        return 2 * momenta

    monkeypatch.setattr(matrix_exchange, "ROUND_ELEMENTS", 13)
    exchange = MatrixExchange([Piece("experts", 0, 0, 0, 30)], {"experts": Experts()}, doubled)
    [(name, step)] = exchange.steps(lambda _: torch.arange(30.0))
    assert name == "experts"
    assert torch.equal(step, 2 * torch.arange(30.0))
    assert stacks == [2, 2, 1]


def test_pieces_that_leave_gaps_are_refused():
    class Stored:
        slice_shapes = ((2, 3),)

    def exchange(*ranges):
        pieces = [Piece("name", 0, 0, start, stop) for start, stop in ranges]
        return MatrixExchange(pieces, {"name": Stored()}, lambda momenta: momenta)

    exchange((4, 6), (0, 4))
    for ranges in ([(0, 5)], [(0, 3), (4, 6)], [(0, 4), (3, 6)], [(0, 7)]):
        with pytest.raises(ValueError, match="pieces of slice 0 of name"):
            exchange(*ranges)
