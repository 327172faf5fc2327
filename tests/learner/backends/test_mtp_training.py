"""The head for the token after the next learns as in plain torch, and the policy does not notice."""

from functools import cache

import numpy as np
import pytest
import torch

from bus.errors import ConfigError
from learner.backends.megatron.core.megatron_core import parallel_state
from learner.backends.megatron.core.process_groups import divide_world
from learner.backends.megatron.next_token_head import FOLLOWING, with_following_tokens
from learner.backends.megatron.trainer import Trainer
from learner.backends.shared.trainable import TrainableWeights
from learner.config.learner import LearnerConfig
from learner.config.loss import SFTLoss
from learner.config.mtp import NO_MTP, MtpConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import UNDIVIDED, ParallelConfig
from learner.data.packing import Sample, pack
from tests.learner.backends.router_reference import given
from tests.learner.mtp_reference import BEHIND_FAMILIES, FAMILIES, LAYER, ReferenceHead, by_day
from tests.learner.tiny import TIS, hf_state, random_samples, tiny_model

pytestmark = pytest.mark.slow

CHANGES = {"deepseek_v3": {"rope": "mscale"}, "qwen3_5_text": {"tied": True}}
LENGTHS = [9, 14, 5, 2, 21, 1, 12]
OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, eps=1e-4)
MTP = MtpConfig(weight=0.3)
STEPS = 2
PLAIN = ParallelConfig(distributed_optimizer=False)


def trainer_of(family="deepseek_v3", *, mtp=MTP, optimizer=OPTIMIZER, layers=2, **settings):
    reference = ReferenceHead(family, optimizer, num_hidden_layers=layers, **CHANGES.get(family, {}))
    return Trainer(reference.model.config, reference.state(), optimizer, mtp=mtp, **settings)


def step(trainer, number, *, loss=TIS, budget=40, rank=0, ranks=1):
    samples = random_samples(LENGTHS, seed=number)[rank::ranks]
    return trainer.train_step(pack(samples, budget), loss, policy_version=3)


def figures(result):
    names = ("mtp_loss_nats", "mtp_correct_fraction", "mtp_grad_norm")
    return [result.diagnostics[name] for name in names]


@cache
def expected(family, layers=2):
    """What each step does to the head, and the head and the policy after all of them."""
    changes = {"num_hidden_layers": layers, **CHANGES.get(family, {})}
    reference = ReferenceHead(family, OPTIMIZER, weight=MTP.weight, **changes)
    steps = [reference.step(random_samples(LENGTHS, seed=number)) for number in range(STEPS)]
    return steps, reference.state()


def assert_trained_like(found, weights, family, layers=2):
    steps, state = expected(family, layers)
    np.testing.assert_allclose(found, steps, atol=3e-5)
    assert weights.keys() == state.keys()
    for name, weight in weights.items():
        assert (weight - state[name]).abs().max() < 2e-4, name


@pytest.mark.parametrize("family", by_day(*BEHIND_FAMILIES))
def test_steps_are_those_of_plain_torch(family):
    trainer = trainer_of(family)
    found = [figures(step(trainer, number)) for number in range(STEPS)]
    assert_trained_like(found, trainer.export(), family)


@pytest.mark.parametrize("family", by_day(*BEHIND_FAMILIES, "qwen3_next", "qwen3_5_text"))
def test_each_gradient_is_that_of_plain_torch(family):
    optimizer = OPTIMIZER.model_copy(update={"clip_grad": 1e9})
    reference = ReferenceHead(family, optimizer, weight=MTP.weight, **CHANGES.get(family, {}))
    trainer = trainer_of(family, optimizer=optimizer)
    [batch] = pack(random_samples(LENGTHS), 100)
    result = trainer.train_step([batch], TIS, policy_version=3)
    np.testing.assert_allclose(figures(result), reference.step(random_samples(LENGTHS)), atol=3e-5)
    with torch.no_grad():  # an export of the gradients is one of weights
        for parameter in trainer.head.head.parameters():
            parameter.copy_(getattr(parameter, "main_grad", parameter))
    gradients, found = reference.gradients(), trainer.export()
    assert len(gradients) >= 15
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 1e-6, name
        assert (found[name] - gradient).abs().max() < 1e-6 + 1e-5 * gradient.abs().max(), name


@pytest.mark.parametrize(
    ("family", "optimizer", "parallel"),
    [
        pytest.param("deepseek_v3", {}, UNDIVIDED, id="adamw"),
        pytest.param("deepseek_v3", {"matrices": "muon"}, UNDIVIDED, id="muon", marks=pytest.mark.nightly),
        pytest.param("deepseek_v3", {}, PLAIN, id="adamw, plain", marks=pytest.mark.nightly),
        pytest.param("deepseek_v3", {"matrices": "muon"}, PLAIN, id="muon, plain"),
        pytest.param("qwen3_next", {}, UNDIVIDED, id="qwen3_next", marks=pytest.mark.nightly),
        pytest.param("qwen3_5_text", {}, PLAIN, id="qwen3_5_text"),
    ],
)
def test_the_policy_is_that_of_a_run_without_a_head_to_the_bit(family, optimizer, parallel):
    optimizer = OPTIMIZER.model_copy(update={"clip_grad": 0.01, **optimizer})
    mtp = MtpConfig(weight=1e4)  # of whose gradient nothing may show
    learning, alone = (
        trainer_of(family, optimizer=optimizer, parallel=parallel, mtp=m) for m in (mtp, NO_MTP)
    )
    begins = (LAYER, "mtp.")
    head = {name: tensor for name, tensor in alone.export().items() if name.startswith(begins)}
    assert head
    for number in range(2):
        for loss in (TIS, SFTLoss()):
            with_head, without = step(learning, number, loss=loss), step(alone, number, loss=loss)
            assert with_head.grad_norm == without.grad_norm > 0.01
            assert with_head.loss == without.loss
            assert with_head.diagnostics.keys() - without.diagnostics.keys() == {
                "mtp_loss_nats", "mtp_correct_fraction", "mtp_grad_norm"
            }  # fmt: skip
    ours, theirs = learning.export(), alone.export()
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        if name in head:
            assert weight.equal(head[name])
            assert ours[name].equal(weight) == name.endswith("e_score_correction_bias"), name
        else:
            assert ours[name].equal(weight), name


def test_tokens_whose_experts_are_given_go_there_in_the_policy_alone():
    model = tiny_model("deepseek_v3", **CHANGES["deepseek_v3"])
    batches = pack(given(random_samples(LENGTHS), model), 40)
    learning, alone = trainer_of(), trainer_of(mtp=NO_MTP)
    with_head, without = (t.train_step(batches, TIS, policy_version=3) for t in (learning, alone))
    assert (with_head.loss, with_head.grad_norm) == (without.loss, without.grad_norm)
    assert figures(with_head)[0] != figures(trainer_of().train_step(pack(
        random_samples(LENGTHS), 40
    ), TIS, policy_version=3))[0]  # fmt: skip


def test_a_gradient_that_is_not_finite_leaves_the_head_as_it_is_and_the_policy_learns():
    trainer = trainer_of()
    with torch.no_grad():
        trainer.head.head.enorm.weight.fill_(torch.nan)
    before = trainer.export()
    result = step(trainer, 0)
    assert not result.skipped
    assert np.isnan(result.diagnostics["mtp_loss_nats"])
    changed = {name for name, tensor in trainer.export().items() if not tensor.equal(before[name])}
    assert changed - {f"{LAYER}enorm.weight"}  # NaN is not itself
    assert not {name for name in changed if name.startswith(LAYER)} - {f"{LAYER}enorm.weight"}


def test_tokens_count_where_they_and_the_one_before_are_trained_in_one_sequence():
    def sample(tokens, mask):
        return Sample(token_ids=np.array(tokens, np.int32), loss_mask=np.array(mask, bool), streams={})

    [batch] = pack([
        sample([1, 2, 3, 4, 5, 6, 7], [1, 0, 1, 1, 1, 0, 1]),
        sample([8, 9, 10], [1, 1, 1]),
        sample([11, 12], [1, 1]),
        sample([13], [1]),
    ], 100)  # fmt: skip
    following = with_following_tokens(batch).streams[FOLLOWING].tolist()
    assert following == [-1, 4, 5, -1, -1, -1, -1, 10, -1, -1, -1, -1, -1]


def test_a_step_without_a_token_that_counts_has_no_figures_of_the_head():
    trainer = trainer_of()
    before = trainer.export()
    samples = [
        Sample(token_ids=np.array([3, 4, 5, 6], np.int32), loss_mask=np.array([0, 1, 0, 1], bool), streams={})
    ]
    result = trainer.train_step(pack(samples, 40), SFTLoss(), policy_version=0)
    assert result.tokens == 2
    assert not {name for name in result.diagnostics if name.startswith("mtp")}
    assert all(t.equal(before[name]) for name, t in trainer.export().items() if name.startswith(LAYER))


def test_the_head_learns_at_its_own_rate():
    heads = {}
    for factor in (1.0, 5.0):
        trainer = trainer_of(mtp=MtpConfig(weight=0.3, lr_factor=factor), optimizer=OptimizerConfig(lr=1e-3))
        before = trainer.export()
        step(trainer, 0)
        heads[factor] = {n: t - before[n] for n, t in trainer.export().items() if n.startswith(LAYER)}
    for name, moved in heads[1.0].items():
        torch.testing.assert_close(heads[5.0][name], 5 * moved, rtol=1e-3, atol=1e-6, msg=name)


def test_settings_that_freeze_weights_freeze_those_of_the_head_too():
    model = ReferenceHead("deepseek_v3", OPTIMIZER)
    frozen = TrainableWeights(freeze=(r"mlp\.gate\.weight", r"layers\.2\.enorm"))
    trainer = Trainer(model.model.config, model.state(), OPTIMIZER, mtp=MTP, trainable=frozen)
    before = trainer.export()
    step(trainer, 0)
    same = {name for name, tensor in trainer.export().items() if tensor.equal(before[name])}
    biases = {name for name in before if name.endswith("e_score_correction_bias")}
    assert same - biases == {f"model.layers.{n}.mlp.gate.weight" for n in (1, 2)} | {f"{LAYER}enorm.weight"}
    assert trainer.frozen_names == {"decoder.layers.1.mlp.router.weight"}
    with pytest.raises(ConfigError, match=r"nothing to train.*set learner\.mtp\.weight=0"):
        Trainer(
            model.model.config, model.state(), OPTIMIZER, mtp=MTP,
            trainable=TrainableWeights(freeze=(r"layers\.2\.",)),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"family": "qwen3_moe"}, r"a qwen3_moe with num_nextn_predict_layers=0, has no head that can be"),
        ({"family": "deepseek_v3"}, r"a deepseek_v3 with num_nextn_predict_layers=0, has no head"),
        ({"family": "glm4_moe", "num_mtp_layers": 2}, r"a glm4_moe with num_nextn_predict_layers=2"),
        ({"family": "qwen3_next"}, r"a qwen3_next with 0 layers `mtp\.layers\.\*` in its files, has no"),
        (
            {"family": "qwen3_5_text", "mtp_num_hidden_layers": 2},
            r"with mtp_num_hidden_layers=2, has no head",
        ),
        (
            {"family": "qwen3_5_text", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": True},
            r"with mtp_use_dedicated_embeddings=true, has a head with an embedding of its own.*weight to 0",
        ),
    ],
)
def test_a_model_without_one_head_is_refused(model, said):
    plain = tiny_model(**model)
    with pytest.raises(ConfigError, match=said):
        Trainer(plain.config, hf_state(plain), OPTIMIZER, mtp=MTP)


@pytest.mark.parametrize(
    ("family", "norm", "projection"),
    [("glm4_moe", f"{LAYER}hnorm", f"{LAYER}eh_proj"), ("qwen3_5_text", "mtp.pre_fc_norm_hidden", "mtp.fc")],
)
def test_a_head_that_lacks_weights_is_refused_by_their_names(family, norm, projection):
    model = ReferenceHead(family, OPTIMIZER)
    state = model.state()
    del state[f"{norm}.weight"]
    state[f"{projection}.weight"] = torch.zeros(64, 64)
    said = rf"missing {norm}\.weight \[64\]\n- {projection}\.weight is \[64, 64\], not \[64, 128\]"
    with pytest.raises(ConfigError, match=said):
        Trainer(model.model.config, state, OPTIMIZER, mtp=MTP)


def test_a_head_of_which_no_weight_is_there_is_refused_by_how_their_names_begin():
    model = ReferenceHead("glm4_moe", OPTIMIZER)
    said = rf"num_nextn_predict_layers=1, has no weights of a head in its files \({LAYER}\): set the"
    with pytest.raises(ConfigError, match=said):
        Trainer(model.model.config, hf_state(model.model), OPTIMIZER, mtp=MTP)


def test_two_layers_of_heads_are_refused():
    model = ReferenceHead("qwen3_next", OPTIMIZER)
    second = {"mtp.layers.1.input_layernorm.weight": torch.zeros(64)}
    with pytest.raises(ConfigError, match=r"a qwen3_next with 2 layers `mtp\.layers\.\*` in its files"):
        Trainer(model.model.config, {**model.state(), **second}, OPTIMIZER, mtp=MTP)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mtp": {"weight": float("inf")}}, r"mtp\.weight\n.*finite number"),
        ({"mtp": {"weight": 0.2, "lr_factor": float("inf")}}, r"mtp\.lr_factor\n.*finite number"),
        ({"backend": "fsdp"}, r"learner\.mtp\.weight=0\.2 with learner\.backend=fsdp.*set megatron"),
        ({"lora": {"rank": 4}}, r"with learner\.lora\.rank=4.*set the rank to 0"),
        (
            {"parallel": {"pipeline": 2, "distributed_optimizer": False}},
            r"pipeline=2 and distributed_optimizer=false: the last stage.*set distributed_optimizer=true",
        ),
        ({"batch": {"share_prefixes": True}}, r"share_prefixes=true: the head reads the next token too"),
        (
            {"mtp": {"lr_factor": 5.0}},
            r"learner\.mtp\.lr_factor=5\.0 has no effect with learner\.mtp\.weight=0",
        ),
    ],
)
def test_settings_beside_which_no_head_is_trained_are_refused_by_name(settings, said):
    with pytest.raises(ValueError, match=said):
        LearnerConfig.model_validate({"mtp": {"weight": 0.2}, **settings})


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        ({"pipeline": 2, "virtual_pipeline": 2}, 4),
        (
            {"pipeline": 2, "virtual_pipeline": 2, "overlap_grad_reduce": True, "overlap_param_gather": True},
            4,
        ),
        ({"pipeline": 2}, 3),
    ],
    ids=["interleaved", "interleaved and overlapped", "uneven"],
)
def test_the_last_stage_of_any_pipeline_trains_it(worlds, layout, layers):
    (found, weights), (others, nothing) = worlds.run(2, train, "deepseek_v3", layout, layers)
    assert others == found
    assert nothing == {}
    assert_trained_like(found, weights, "deepseek_v3", layers)


LAYOUTS = {
    "dp2": {},
    "dp2 overlapped": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "dp2 plain": {"distributed_optimizer": False},
    "ep2": {"expert": 2},
    "cp2": {"context": 2},
    "cp2 ring, short whole": {"context": 2, "context_attention": "ring", "context_min_tokens": 13},
    "pp2": {"pipeline": 2},
    "pp2 overlapped": {"pipeline": 2, "overlap_grad_reduce": True, "overlap_param_gather": True},
    "tp2": {"tensor": 2},
    "tp2 sp ep2": {"tensor": 2, "sequence": True, "expert": 2},
    "tp2 sp etp2 recomputed": {"tensor": 2, "sequence": True, "expert_tensor": 2, "recompute": "full"},
}


def train(family, layout, layers=2):
    parallel = ParallelConfig(**layout)
    divide_world(parallel)
    trainer = trainer_of(family, layers=layers, parallel=parallel)
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    found = [figures(step(trainer, number, rank=rank, ranks=ranks)) for number in range(STEPS)]
    return found, trainer.export()


SLOW = {
    ("dp2", "glm4_moe"), ("cp2", "deepseek_v3"), ("pp2", "glm4_moe"), ("tp2 sp ep2", "deepseek_v3"),
    ("cp2 ring, short whole", "qwen3_next"), ("pp2", "qwen3_5_text"), ("tp2", "qwen3_5_text"),
}  # fmt: skip
"""Layouts and families that are tried by day."""


def is_possible(layout, family):
    """Whether ranks may share so: experts want `sequence`, where there are some."""
    if family == "qwen3_5_text":
        return not {"expert", "expert_tensor"} & layout.keys()
    return layout.get("tensor", 1) == 1 or "sequence" in layout


@pytest.mark.first(2, others=pytest.mark.nightly)
@pytest.mark.parametrize(
    ("layout", "family"),
    [
        pytest.param(
            layout, family, id=f"{name}-{family}",
            marks=pytest.mark.slow if (name, family) in SLOW else pytest.mark.nightly,
        )
        for name, layout in LAYOUTS.items()
        for family in FAMILIES
        if is_possible(layout, family)
    ],
)  # fmt: skip
def test_every_layout_of_ranks_trains_it_alike(worlds, family, layout):
    (found, weights), (others, nothing) = worlds.run(2, train, family, layout)
    assert others == found
    assert nothing == {}
    assert_trained_like(found, weights, family)
