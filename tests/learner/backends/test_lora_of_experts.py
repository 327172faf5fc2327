"""Routed experts of mixtures have adapters of their own."""

import gc
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode

from bus.errors import ConfigError
from bus.messages import BlobRef
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.megatron.core.process_groups import divide_world
from learner.backends.megatron.trainer import Trainer
from learner.backends.model_loading import merged_model
from learner.backends.shared.lora import merged_stream
from learner.checkpoint.commit import load_checkpoint, save_checkpoint
from learner.config.lora import LoraConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import UNDIVIDED, ParallelConfig
from learner.data.packing import pack
from learner.model_directories.model_directory import save_hf_directory
from learner.publication.adapter_directory import write_adapter
from storage.disk.checkpoints import latest
from storage.model_files.adapter_names import adapter_names
from tests.learner.backends.divided_adapters import assert_same, divided, trained, trained_alone
from tests.learner.backends.fsdp.adapter_steps import assert_steps_are_those_of_the_formula
from tests.learner.lora_reference import adapt
from tests.learner.tiny import TIS, hf_state, random_samples, reference_logits, tiny_model
from tests.suites import thinned

pytestmark = pytest.mark.slow

LENGTHS = [5, 17, 2, 32, 9, 20, 20, 3]
OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=3, weight_decay=0.1, eps=1e-4)
LORA = LoraConfig(rank=4, alpha=6.0, experts=True)
STABILISED = LORA.model_copy(
    update={"rank_stabilised": True, "targets": ("o_proj", "gate_proj", "down_proj")}
)
DORA = LORA.model_copy(update={"weight_decomposed": True})
BACKENDS = {"megatron": Trainer, "fsdp": FsdpTrainer}


def trainer_of(
    lora: LoraConfig, family: str, parallel: ParallelConfig = UNDIVIDED, *, backend: str = "megatron",
    dtype: torch.dtype = torch.float32,
):  # fmt: skip
    model = tiny_model(family)
    torch.manual_seed(7)  # of the adapters
    return BACKENDS[backend](
        model.config, hf_state(model), OPTIMIZER, lora=lora, parallel=parallel, dtype=dtype
    )


def step(trainer, number: int) -> tuple[float, float]:
    ranks = trainer.data_parallel_group
    samples = random_samples(LENGTHS, seed=number)[ranks.rank() :: ranks.size()]
    result = trainer.train_step(pack(samples, 56), TIS, policy_version=3)
    return result.loss, result.grad_norm


def adapters(trainer):
    return {name: tensor.clone() for name, tensor in trainer.adapters.streamed()}


@pytest.mark.parametrize(
    ("backend", "family", "lora"),
    [
        ("megatron", "qwen3_moe", LORA),
        pytest.param("megatron", "qwen3_moe", STABILISED, marks=pytest.mark.nightly),
        ("megatron", "qwen3_moe", DORA),
        ("megatron", "deepseek_v3", LORA),
        ("fsdp", "qwen3_moe", LORA),
        ("fsdp", "qwen3_moe", STABILISED),
        pytest.param("fsdp", "deepseek_v3", LORA, marks=pytest.mark.nightly),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_steps_are_those_of_the_formula(backend, family, lora):
    trainer, model = trainer_of(lora, family, backend=backend), tiny_model(family)
    begun = adapters(trainer)
    assert (
        sum(".mlp.experts." in name for name in begun)
        == {
            ("qwen3_moe", ()): 2 * 6 * 3 * 2,  # layers, experts, projections, A and B
            ("qwen3_moe", STABILISED.targets): 2 * 6 * 2 * 2,
            ("deepseek_v3", ()): 1 * 8 * 3 * 2,
        }[family, lora.targets]
        * (3 if lora.weight_decomposed else 2)
        // 2
    )
    assert_steps_are_those_of_the_formula(trainer, model, begun, 3.0 if lora.rank_stabilised else 1.5)


@pytest.mark.parametrize(
    "family",
    thinned(
        ["mixtral", "glm4_moe", "qwen3_next", "qwen3_5_moe_text"], "mixtral", "qwen3_next",
        rest=pytest.mark.nightly,
    ),
)  # fmt: skip
def test_each_step_of_fsdp_is_megatrons(family):
    lora = LORA if family == "mixtral" else STABILISED
    assert_same(trained_alone("fsdp", lora, family=family), trained_alone("megatron", lora, family=family))


def test_two_ranks_of_fsdp_train_the_same_adapters_of_experts_as_one(worlds):
    (found, (_, *nothing)) = worlds.run(2, partial(trained, "fsdp", LORA, family="qwen3_moe"))
    assert nothing == [{}, {}]
    assert_same(found, trained_alone("fsdp", LORA, family="qwen3_moe"))


QWEN, GLM = {"family": "qwen3_moe"}, {"family": "glm4_moe"}
SPLIT = {"tensor": 2, "sequence": True}
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS = {
    "ep2": (2, {"expert": 2}, LORA, QWEN),
    "ep2 overlapped dora": (2, {"expert": 2, **OVERLAPPED}, DORA, QWEN),
    "ep2 plain": (2, {"expert": 2, "distributed_optimizer": False}, STABILISED, QWEN),
    "etp2": (2, {"expert_tensor": 2}, LORA, QWEN),
    "etp2 dora": (2, {"expert_tensor": 2, "recompute": "full"}, DORA, QWEN),
    "tp2 sp glm": (2, SPLIT, LORA, GLM),
    "tp2 sp ep2": (2, {**SPLIT, "expert": 2}, LORA, QWEN),
    "tp2 sp ep2 qwen3-next": (2, {**SPLIT, "expert": 2}, LORA, {"family": "qwen3_next"}),
    "tp2 sp etp2": (2, {**SPLIT, "expert_tensor": 2}, LORA, QWEN),
    "pp2": (2, {"pipeline": 2}, LORA, QWEN),
    "tp2 sp ep2 etp2 dora": (4, {**SPLIT, "expert": 2, "expert_tensor": 2}, DORA, QWEN),
}
MARKS = {name: pytest.mark.slow if LAYOUTS[name][0] == 2 else pytest.mark.nightly for name in LAYOUTS}


@pytest.mark.first(3, others=pytest.mark.nightly)
@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS[name]) for name in LAYOUTS])
def test_every_layout_of_ranks_trains_the_same_adapters_of_experts(worlds, name):
    ranks, layout, lora, model = LAYOUTS[name]
    found = worlds.run(ranks, divided, layout, lora, model)
    assert_same(found[0], trained_alone("megatron", lora, **model))
    assert any(".mlp.experts." in each for each in found[0][1])


@pytest.mark.parametrize(
    ("backend", "family", "lora"),
    [
        pytest.param("megatron", "qwen3_moe", LORA, marks=pytest.mark.nightly),
        ("megatron", "qwen3_moe", DORA),
        pytest.param("megatron", "deepseek_v3", LORA, marks=pytest.mark.nightly),
        ("fsdp", "qwen3_moe", LORA),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_merged_weights_compute_what_frozen_ones_do_with_adapters(backend, family, lora):
    trainer, model = trainer_of(lora, family, backend=backend), tiny_model(family)
    packs = pack(random_samples(LENGTHS), 56)
    begun = trainer.logprobs(packs)
    for number in range(2):
        step(trainer, number)
    before, after = hf_state(model), trainer.export()
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert {f"model.layers.1.mlp.experts.5.{part}_proj.weight" for part in ("gate", "up", "down")} <= changed
    plain = BACKENDS[backend](model.config, after, OPTIMIZER)
    for ours, theirs, first in zip(trainer.logprobs(packs), plain.logprobs(packs), begun, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5, equal_nan=True)
        assert not torch.allclose(ours, first, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize(("backend", "family"), [("megatron", "mixtral"), ("fsdp", "qwen3_moe")])
def test_the_reference_is_the_policy_without_adapters_of_experts(backend, family):
    trainer, model = trainer_of(LORA, family, backend=backend), tiny_model(family)
    packs = pack(random_samples(LENGTHS), 56)
    begun = trainer.logprobs(packs)
    step(trainer, 0)
    trainer.frozen.load("reference", model.config, hf_state(model), Path("elsewhere"))
    with trainer.frozen.in_place("reference"):
        reference = trainer.logprobs(packs)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(begun, reference, strict=True))


def saved(root: Path, layout: dict[str, object], backend: str = "megatron") -> tuple[float, float]:
    """Take two steps and save; return the third step."""
    parallel = ParallelConfig.model_validate(layout)
    divide_world(parallel)
    trainer = trainer_of(LORA, "qwen3_moe", parallel, backend=backend)
    for number in range(2):
        step(trainer, number)
    save_checkpoint(trainer, root, 2, {}, keep=1)
    return step(trainer, 2)


def resumed(root: Path, layout: dict[str, object], backend: str = "megatron") -> tuple[float, float]:
    """Load, and return the third step."""
    parallel = ParallelConfig.model_validate(layout)
    divide_world(parallel)
    trainer = trainer_of(LORA, "qwen3_moe", parallel, backend=backend)
    load_checkpoint(trainer, latest(root))
    return step(trainer, 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_goes_on_from_a_checkpoint_of_adapters_of_experts_to_the_bit(tmp_path, backend):
    expected = saved(tmp_path, {}, backend)
    assert resumed(tmp_path, {}, backend) == expected
    other = trainer_of(LORA.model_copy(update={"experts": False}), "qwen3_moe", backend=backend)
    with pytest.raises(ConfigError, match=r"was trained with learner\.lora\.experts=True: keep"):
        load_checkpoint(other, latest(tmp_path))


@pytest.mark.parametrize(
    ("backend", "family"), [("megatron", "qwen3_moe"), ("fsdp", "qwen3_moe"), ("fsdp", "deepseek_v3")]
)
def test_adapters_of_experts_in_a_checkpoint_make_the_weights_that_the_run_exports(tmp_path, backend, family):
    model = tiny_model(family)
    save_hf_directory(tmp_path / "model", model.config, hf_state(model), None)
    trainer = trainer_of(LORA, family, backend=backend)
    for number in range(2):
        step(trainer, number)
    save_checkpoint(trainer, tmp_path / "checkpoints", 2, {}, keep=1)
    _, found = merged_model(latest(tmp_path / "checkpoints"), tmp_path / "model", LORA)
    exported = trainer.export()
    assert found.keys() == exported.keys()
    assert [name for name in exported if not torch.equal(found[name], exported[name])] == []
    changed = [name for name, weight in hf_state(model).items() if not torch.equal(found[name], weight)]
    assert any(".mlp.experts.3.down_proj" in name for name in changed)


def test_a_checkpoint_of_adapters_of_experts_is_loaded_by_another_layout_of_ranks(worlds, tmp_path):
    expected = worlds.run(2, saved, tmp_path, {"expert": 2})[0]
    assert worlds.run(2, resumed, tmp_path, {"expert": 2})[0] == expected
    for layout in ({"expert_tensor": 2}, {"pipeline": 2}, {**SPLIT, "expert": 2}):
        assert worlds.run(2, resumed, tmp_path, layout)[0] == pytest.approx(expected, abs=1e-5)


def test_what_is_announced_of_experts_does_not_grow_with_their_number():
    blob = BlobRef(subject="s", chunks=1, size_bytes=1, digest="ab" * 16)
    announced = trainer_of(LORA, "deepseek_v3").adapters.described([blob], "ab" * 16)
    assert [each for each in announced.modules if not each.startswith("self_attn.")] == [
        *(f"experts.{part}_proj" for part in ("down", "gate", "up")),
        *(f"mlp.{part}_proj" for part in ("down", "gate", "up")),
        *(f"shared_experts.{part}_proj" for part in ("down", "gate", "up")),
    ]


@pytest.mark.parametrize(
    ("backend", "family", "lora", "reason"),
    [
        ("megatron", "qwen3", LORA, "learner.lora.experts=true: the model has no routed experts"),
        ("megatron", "gpt_oss", LORA, "each have a tensor of their own in its files: leave it out"),
        ("fsdp", "gpt_oss", LORA, "each have a tensor of their own in its files: leave it out"),
        (
            "fsdp", "qwen3_moe", LORA.model_copy(update={"targets": ("experts.3.up_proj",)}),
            "some experts of a layer alone have an adapter of up_proj, as .*experts.3.up_proj, which",
        ),
        (
            "megatron", "qwen3_moe", LORA.model_copy(update={"targets": ("up_proj",)}),
            "nothing to train besides experts",
        ),
        *((
            backend, "qwen3_moe", LORA.model_copy(update={"targets": ("q_proj",)}),
            "experts=true has no effect with .*: add down_proj, gate_proj, up_proj or some",
        ) for backend in BACKENDS),
        *((
            backend, "qwen3_moe", LoraConfig(rank=4, targets=("q_proj", "up_proj")),
            "named 'up_proj'; .*; routed experts have one, and adapters with learner.lora.experts=true",
        ) for backend in BACKENDS),
    ],
)  # fmt: skip
def test_adapters_of_experts_that_there_cannot_be_are_refused_in_words(backend, family, lora, reason):
    with pytest.raises(ConfigError, match=reason):
        trainer_of(lora, family, backend=backend)


STABILISED_HALF = STABILISED.model_copy(update={"targets": ("q_proj", "gate_proj")})
PARAMETERS = ["down_proj", "gate_up_proj"]
WRITTEN = {
    "experts alone": (
        "qwen3_moe", LORA,
        {"target_modules": ["k_proj", "o_proj", "q_proj", "v_proj"], "target_parameters": PARAMETERS},
        12.0,
    ),
    "a part, rank-stabilised": (
        "qwen3_moe", STABILISED_HALF,
        {
            "target_modules": [f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)],
            "target_parameters": PARAMETERS,
        },
        6.0 * 2**0.5,
    ),
    "beside dense layers": (
        "glm4_moe", LORA,
        {
            "target_modules": ["k_proj", "o_proj", "q_proj", "v_proj"],
            "target_parameters": [
                f"model.layers.{module}.{part}_proj.weight"
                for module in ("0.mlp", "1.mlp.shared_experts") for part in ("gate", "up", "down")
            ] + PARAMETERS,
        },
        12.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_adapters_of_experts_are_written_as_peft_reads_them(tmp_path, name):
    family, lora, targets, alpha = WRITTEN[name]
    trainer = trainer_of(lora, family)
    step(trainer, 0)
    write_adapter(tmp_path, trainer.adapters, adapters(trainer), "a/model")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert {key: config[key] for key in targets} == targets
    assert config["rank_pattern"] == {r".*\.gate_up_proj": 8}, "gate and up are one tensor there"
    assert config["alpha_pattern"] == {r".*\.gate_up_proj": alpha}
    found, held = load_file(tmp_path / "adapter_model.safetensors"), adapters(trainer)
    of_experts = {each for each in found if ".mlp.experts." in each}
    assert len(of_experts) == (1 if family == "glm4_moe" else 2) * 6 * 3 * 2, "peft makes one of all"
    assert all(torch.equal(found[each], tensor) for each, tensor in held.items())
    assert not any(found[each].any() for each in found.keys() - held.keys())
    model, samples = tiny_model(family), random_samples(LENGTHS)
    adapt(model, found, lora.scale)
    [batch] = pack(samples, 200)
    [[logprobs, _]] = trainer.logprobs([batch])
    with torch.no_grad():
        wanted = torch.log_softmax(reference_logits(model, samples), -1).gather(-1, batch.labels[:, None])
    assert (wanted[:, 0] - logprobs)[batch.loss_mask].abs().max() < 1e-5


def test_dense_layers_of_mixtures_are_written_as_parameters_which_peft_does_not_take_for_experts(tmp_path):
    trainer = trainer_of(LORA.model_copy(update={"experts": False}), "deepseek_v3")
    write_adapter(tmp_path, trainer.adapters, adapters(trainer), "a/model")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert not any(name.endswith(("gate_proj", "up_proj", "down_proj")) for name in config["target_modules"])
    assert len(config["target_parameters"]) == 2 * 3
    assert "rank_pattern" not in config


def test_adapters_of_all_experts_wait_on_the_host_while_weights_are_merged():
    """Tensors of a GPU, without their values, show where each one lies."""
    layers, live = [f"experts.{n}.up_proj" for n in range(8)], []

    def on_device(*names: str) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            yield name, torch.ones(4, 4, device="cuda")
            live.append(
                sum(isinstance(one, FakeTensor) and one.device.type == "cuda" for one in gc.get_objects())
            )

    weights = on_device(*(f"{layer}.weight" for layer in layers), "norm.weight")
    adapters = on_device(*(name for layer in layers for name in adapter_names(f"{layer}.weight")))
    with FakeTensorMode():
        merged = {name: tensor.device.type for name, tensor in merged_stream(weights, adapters, layers, 2.0)}
    assert merged == dict.fromkeys([*(f"{layer}.weight" for layer in layers), "norm.weight"], "cuda")
    assert max(live) < 4, "one adapter after another, then one weight with its own"
