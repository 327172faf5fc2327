"""Both backends train the same adapters, in any layout of ranks."""

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from bus.errors import ConfigError
from learner.backends.megatron.conversion.base import is_adapter
from learner.backends.megatron.trainer import Trainer
from learner.backends.model_loading import load_hf_directory
from learner.backends.shared.lora import refuse_other_adapters
from learner.backends.shared.trainable import TrainableWeights
from learner.checkpoint.commit import load_checkpoint, save_checkpoint
from learner.config.lora import LoraConfig, saved_settings
from learner.config.loss import SFTLoss
from learner.config.parallel import ParallelConfig
from learner.data.packing import pack
from storage.disk.checkpoints import latest
from tests.learner.backends.divided_adapters import (
    BACKENDS,
    LENGTHS,
    OPTIMIZER,
    assert_same,
    divided,
    step,
    trained_alone,
    trainer_of,
)
from tests.learner.division import divide_world
from tests.learner.tiny import hf_state, random_samples, tiny_model

LORA = LoraConfig(rank=4, alpha=6.0)
SOME = LoraConfig(rank=3, alpha=2.0, targets=("q_proj", "v_proj", "up_proj", "o_proj"))
DORA = LORA.model_copy(update={"weight_decomposed": True})
SOME_DORA = SOME.model_copy(update={"weight_decomposed": True})
SOME_OF_ATTENTION = LoraConfig(rank=4, alpha=2.0, targets=("k_proj", "q_proj"))


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize("lora", [LORA, SOME, DORA, SOME_DORA], ids=["all", "some", "dora", "some dora"])
def test_each_step_of_megatron_is_fsdps(lora):
    assert_same(trained_alone("megatron", lora), trained_alone("fsdp", lora))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "glm4_moe", "deepseek_v3"])
def test_lengths_of_rows_are_fsdps_beside_biases_and_in_other_orders_of_rows(family):
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    if family == "deepseek_v3":
        attention = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    lora = DORA.model_copy(update={"targets": attention})
    assert_same(trained_alone("megatron", lora, family=family), trained_alone("fsdp", lora, family=family))


@pytest.mark.slow
def test_adapters_of_heads_that_are_rotated_in_part_lie_as_transformers_has_them():
    """GLM's queries and keys have another order in Megatron's model."""
    attention = LoraConfig(rank=4, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
    glm = {"family": "glm4_moe"}
    assert_same(trained_alone("megatron", attention, **glm), trained_alone("fsdp", attention, **glm))


@pytest.mark.slow
@pytest.mark.parametrize("query_rank", [40, None])
def test_adapters_of_latent_attention_are_those_of_its_linear_layers(query_rank):
    queries = ("q_proj",) if query_rank is None else ("q_a_proj", "q_b_proj")
    lora = LoraConfig(rank=4, targets=(*queries, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"))
    model = {"family": "deepseek_v3", "q_lora_rank": query_rank}
    assert_same(trained_alone("megatron", lora, **model), trained_alone("fsdp", lora, **model))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("gemma3_text", ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
        ("gpt_oss", ("q_proj", "k_proj", "v_proj", "o_proj")),
    ],
)
def test_adapters_of_layers_with_biases_or_norms_behind_them_are_added_before_these(family, targets):
    lora = LoraConfig(rank=4, targets=targets)
    assert_same(trained_alone("megatron", lora, family=family), trained_alone("fsdp", lora, family=family))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_adapters_of_linear_attention_are_those_of_its_linear_layers(family):
    projections = {"qwen3_next": ("in_proj_qkvz", "in_proj_ba"), "qwen3_5_text": ("in_proj_qkv", "in_proj_b")}
    lora = LoraConfig(rank=4, targets=(*projections[family], "out_proj", "q_proj", "v_proj", "o_proj"))
    assert_same(trained_alone("megatron", lora, family=family), trained_alone("fsdp", lora, family=family))


@pytest.mark.slow
def test_neither_backend_gives_gates_of_shared_experts_an_adapter():
    model = {"family": "qwen3_next"}
    ours, theirs = trained_alone("megatron", LORA, **model), trained_alone("fsdp", LORA, **model)
    assert_same(ours, theirs)
    for backend in BACKENDS:
        with pytest.raises(ConfigError, match=r"no linear layer .* is named 'shared_expert_gate'"):
            trainer_of(backend, LoraConfig(rank=4, targets=("shared_expert_gate",)), **model)


ONE_HEAD = {"num_key_value_heads": 1}
FOUR_LAYERS = {"num_hidden_layers": 4}
MOE = {"family": "qwen3_moe"}
LAYOUTS = {
    "dp2": (2, {}, LORA, {}),
    "dp2 plain": (2, {"distributed_optimizer": False}, SOME, {}),
    "dp2 overlapped": (2, {"overlap_grad_reduce": True, "overlap_param_gather": True}, LORA, {}),
    "tp2": (2, {"tensor": 2}, LORA, {}),
    "tp2 of one key-value head": (2, {"tensor": 2}, LORA, ONE_HEAD),
    "tp2 sp some of one key-value head": (2, {"tensor": 2, "sequence": True}, SOME, ONE_HEAD),
    "tp4 sp of two key-value heads": (4, {"tensor": 4, "sequence": True}, LORA, {}),
    "tp2 sp glm of one key-value head": (
        2, {"tensor": 2, "sequence": True}, SOME_OF_ATTENTION, {"family": "glm4_moe", **ONE_HEAD},
    ),
    "tp2 sp glm": (2, {"tensor": 2, "sequence": True}, LORA, {"family": "glm4_moe"}),
    "tp2 sp deepseek": (2, {"tensor": 2, "sequence": True}, LORA, {"family": "deepseek_v3"}),
    "tp2 sp gemma": (2, {"tensor": 2, "sequence": True}, LORA, {"family": "gemma3_text"}),
    "tp2 sp gpt-oss": (
        2, {"tensor": 2, "sequence": True},
        LORA.model_copy(update={"targets": ("q_proj", "k_proj", "v_proj", "o_proj")}),
        {"family": "gpt_oss"},
    ),
    "tp2 sp qwen3.5": (2, {"tensor": 2, "sequence": True}, LORA, {"family": "qwen3_5_text"}),
    "tp2 dora qwen3-next": (2, {"tensor": 2, "sequence": True}, DORA, {"family": "qwen3_next"}),
    "cp2 qwen3-next": (2, {"context": 2, "recompute": "selective"}, LORA, {"family": "qwen3_next"}),
    "tp2 sp some": (2, {"tensor": 2, "sequence": True}, SOME, {}),
    "tp2 sp merged recomputed": (
        2, {"tensor": 2, "sequence": True, "recompute": "full"},
        LORA.model_copy(update={"publish": "merged"}), {"family": "qwen2"},
    ),
    "tp2 sp dora": (2, {"tensor": 2, "sequence": True}, DORA, {"family": "qwen2"}),
    "tp2 dora of one key-value head": (2, {"tensor": 2}, SOME_DORA, ONE_HEAD),
    "tp2 sp dora deepseek": (2, {"tensor": 2, "sequence": True}, DORA, {"family": "deepseek_v3"}),
    "dp2 overlapped dora": (2, {"overlap_grad_reduce": True, "overlap_param_gather": True}, DORA, {}),
    "tp4 sp dora of two key-value heads": (4, {"tensor": 4, "sequence": True}, DORA, {"family": "qwen2"}),
    "pp2 vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2}, LORA, FOUR_LAYERS),
    "cp2 recomputed": (2, {"context": 2, "recompute": "full"}, LORA, {}),
    "ep2": (2, {"expert": 2}, LORA, MOE),
    "tp2 sp pp2": (4, {"tensor": 2, "sequence": True, "pipeline": 2}, SOME, {}),
}  # fmt: skip


NIGHTLY = (
    "dp2 plain", "dp2 overlapped", "tp2", "tp2 sp glm", "tp2 sp gemma", "tp2 sp some", "tp2 sp dora",
    "tp2 sp some of one key-value head", "cp2 qwen3-next",
)  # fmt: skip
"""Layouts of two ranks whose parts other layouts have too."""
MARKS = {
    name: pytest.mark.slow if LAYOUTS[name][0] == 2 and name not in NIGHTLY else pytest.mark.nightly
    for name in LAYOUTS
}


@pytest.mark.first(3, others=pytest.mark.nightly)
@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS[name]) for name in LAYOUTS])
def test_every_layout_of_ranks_trains_the_same_adapters(worlds, name):
    ranks, layout, lora, model = LAYOUTS[name]
    found = worlds.run(ranks, divided, layout, lora, model)
    assert all(adapters == {} and weights == {} for _, adapters, weights in found[1:])
    assert_same(found[0], trained_alone("megatron", lora, **model))


ONE_LAYER = {
    "adapters": (
        {"lora": LoraConfig(rank=4, targets=("layers.0.self_attn.q_proj",))},
        "learner.lora.targets=",
    ),
    "weights": ({"trainable": TrainableWeights(train_only=(r"layers\.0\.",))}, "model.train_only="),
}


def refusal(trained: dict[str, object], layout: dict[str, object], model_changes: dict[str, object]) -> str:
    """Return with which error this rank refuses what is trained; empty for none."""
    parallel, built = ParallelConfig(**layout), tiny_model(**model_changes)
    divide_world(parallel)
    try:
        Trainer(built.config, hf_state(built), OPTIMIZER, parallel=parallel, **trained)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_LAYER)
def test_all_stages_refuse_what_leaves_one_nothing_to_train(worlds, name):
    trained, setting = ONE_LAYER[name]
    [first, last] = worlds.run(2, refusal, trained, {"pipeline": 2}, {})
    assert first == last
    assert setting in first
    assert "leave rank 1 of the learner nothing to train" in first


def test_experts_alone_are_refused():
    model = tiny_model(**MOE)
    with pytest.raises(ConfigError, match="leave rank 0 of the learner nothing to train besides experts"):
        Trainer(
            model.config, hf_state(model), OPTIMIZER, trainable=TrainableWeights(train_only=(r"\.experts\.",))
        )


def saved(
    root: Path, layout: dict[str, object], model: dict[str, object], lora: LoraConfig = LORA
) -> list[tuple[float, float]]:
    """Take two steps and save; return the third step."""
    divide_world(ParallelConfig.model_validate(layout))
    trainer = trainer_of("megatron", lora, ParallelConfig.model_validate(layout), **model)
    trainer.frozen.hold("reference")
    for number in range(2):
        step(trainer, number)
    save_checkpoint(trainer, root, 2, {}, keep=1)
    return [step(trainer, 2)]


def resumed(
    root: Path, layout: dict[str, object], model: dict[str, object], lora: LoraConfig = LORA
) -> list[tuple[float, float]]:
    """Load, and return the third step."""
    divide_world(ParallelConfig.model_validate(layout))
    trainer = trainer_of("megatron", lora, ParallelConfig.model_validate(layout), **model)
    load_checkpoint(trainer, latest(root))
    assert trainer.frozen.own == {"reference"}
    return [step(trainer, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [LORA, DORA], ids=["plain", "with lengths of rows"])
def test_megatron_goes_on_from_a_checkpoint_of_the_adapters_to_the_bit(tmp_path, lora):
    expected = saved(tmp_path, {}, {}, lora)
    assert resumed(tmp_path, {}, {}, lora) == expected
    held = FileSystemReader(latest(tmp_path)).read_metadata().state_dict_metadata
    assert {name for name in held if not is_adapter(name)} == {"rng/shard_0_1"}
    with pytest.raises(ConfigError, match="adapters alone"):
        load_hf_directory(latest(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "lora"), [({}, LORA), (ONE_HEAD, DORA)], ids=["plain", "lengths of rows of one key-value head"]
)
def test_a_checkpoint_of_adapters_is_loaded_by_another_layout_of_ranks(worlds, tmp_path, model, lora):
    [expected, _] = worlds.run(2, saved, tmp_path, {"tensor": 2}, model, lora)
    for layout in ({"tensor": 2}, {"pipeline": 2}):
        [found, _] = worlds.run(2, resumed, tmp_path, layout, model, lora)
        assert found[0] == pytest.approx(expected[0], abs=0 if "tensor" in layout else 1e-5)


DENSE_STAGE = {"family": "glm4_moe"}
"""The first of its two layers, and of two stages of a pipeline, has no experts."""


def with_plain_optimizers(root: Path) -> tuple[str, list[tuple[float, float]]]:
    """Return how training all weights is refused, and the second step of adapters twice, the last resumed."""
    layout = {"pipeline": 2, "distributed_optimizer": False}
    told = refusal({}, layout, DENSE_STAGE)
    seconds = []
    for _ in range(2):
        trainer = trainer_of("megatron", LORA, ParallelConfig(**layout), **DENSE_STAGE, tied=False)
        if seconds:
            load_checkpoint(trainer, latest(root))
        else:
            step(trainer, 0)
            save_checkpoint(trainer, root, 1, {}, keep=1)
        seconds.append(step(trainer, 1))
    return told, seconds


@pytest.mark.slow
def test_experts_of_some_stages_need_the_distributed_optimizer_where_they_are_trained(worlds, tmp_path):
    for told, [before, after] in worlds.run(2, with_plain_optimizers, tmp_path):
        assert "distributed_optimizer=false, where rank 0 of the learner trains no experts" in told
        assert before == after


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize("lora", [LORA, DORA], ids=["plain", "with lengths of rows"])
def test_megatrons_reference_is_the_policy_without_its_adapter(lora):
    trainer, model = trainer_of("megatron", lora), tiny_model(tied=True)
    packs = pack(random_samples(LENGTHS), 56)
    begun = trainer.logprobs(packs)
    step(trainer, 0)
    trainer.frozen.load("reference", model.config, hf_state(model), Path("elsewhere"))
    changed = trainer.logprobs(packs)
    with trainer.frozen.in_place("reference"):
        reference = trainer.logprobs(packs)
    assert not any(torch.allclose(a, b, equal_nan=True) for a, b in zip(begun, changed, strict=True))
    assert all(torch.allclose(a, b, 0, 0, equal_nan=True) for a, b in zip(begun, reference, strict=True))


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize("backend", BACKENDS)
def test_adapters_of_bfloat16_models_learn_and_are_published_in_it(backend):
    trainer = trainer_of(backend, LORA, dtype=torch.bfloat16)
    samples = pack(random_samples(LENGTHS), 200)
    losses = [trainer.train_step(samples, SFTLoss(), policy_version=0).loss for _ in range(6)]
    assert losses[-1] < losses[0]
    exported = trainer.exported()
    assert {tensor.dtype for _, tensor in exported.rest()} == set(exported.exact.values()) == {torch.bfloat16}
    assert not exported.here
    assert {tensor.dtype for tensor in trainer.export().values()} == {torch.bfloat16}


def test_a_checkpoint_without_adapters_is_refused_in_words(tmp_path):
    ours = {**saved_settings(LORA), "base": "1f"}
    with pytest.raises(ConfigError, match=r"was trained without adapters \(learner\.lora\.rank=0\): keep"):
        refuse_other_adapters(tmp_path, None, ours)
    with pytest.raises(ConfigError, match=r"was trained with learner\.lora\.rank=2: keep"):
        refuse_other_adapters(tmp_path, ours | {"rank": 2}, ours)
    with pytest.raises(ConfigError, match="was trained with adapters of a model with other weights"):
        refuse_other_adapters(tmp_path, ours | {"base": "2f"}, ours)
    refuse_other_adapters(tmp_path, ours, dict(ours))
    older = {name: value for name, value in ours.items() if name != "weight_decomposed"}
    refuse_other_adapters(tmp_path, older, ours)
    with pytest.raises(ConfigError, match=r"was trained with learner\.lora\.weight_decomposed=False: keep"):
        refuse_other_adapters(tmp_path, older, ours | {"weight_decomposed": True})


def test_experts_have_no_adapters_unless_asked_for_and_a_target_of_theirs_says_how():
    assert len(list(trainer_of("megatron", LORA, **MOE).adapters.streamed())) == 2 * 2 * 4  # attention's
    said = r"named 'up_proj'; there are k_proj, o_proj, q_proj, v_proj; .* with learner\.lora\.experts=true"
    with pytest.raises(ConfigError, match=said):
        trainer_of("megatron", SOME, **MOE)
