"""`launch plan`: counts against models that are built, bytes against learners, figures of H200s."""

import gc
import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from bus.codec import encode
from bus.config import BusConfig, StreamsConfig
from bus.errors import ConfigError
from launch.cli.main import main
from launch.plan.memory import Model, checkpoint_bytes, learner_rank, publication_copies
from launch.plan.plan import Question, held_traffic, plan, run_hf_config, trajectory_token_bytes
from launch.plan.report import plan_lines
from launch.plan.sizes import adapter_elements, kv_bytes, weights_of
from launch.services.learner import say_streams
from launch.settings.run_config import resolve
from learner.backends.factory import BACKENDS, close_world, init_world
from learner.config.learner import LearnerConfig
from learner.config.lora import NO_LORA
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import UNDIVIDED, ParallelConfig
from learner.data.packing import pack
from learner.metrics.gpus import GPUS
from tests.factories import make_trajectory
from tests.learner.division import divide_world
from tests.learner.tiny import FAMILIES, TIS, hf_state, random_samples, tiny_config, tiny_model
from tests.learner.worlds import Worlds

GIB = 1 << 30


def qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=128, vocab_size=151936,
        tie_word_embeddings=tied, max_position_embeddings=32768,
    )  # fmt: skip


SMALL = qwen3(1024, 3072, 28, 16, tied=True)
LARGE = qwen3(4096, 12288, 36, 32, tied=False)
MIXTURE = Qwen3MoeConfig(
    hidden_size=1024, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
    num_experts=32, num_experts_per_tok=4, moe_intermediate_size=512, vocab_size=151936,
    tie_word_embeddings=True, max_position_embeddings=32768,
)  # fmt: skip


@cache
def counted(description: str) -> list:
    hf_config = AutoConfig.for_model(**json.loads(description))
    return weights_of(hf_config)


def model_of(hf_config, *, item_bytes: int = 2, on_gpu: bool = True) -> Model:
    weights = counted(hf_config.to_json_string(use_diff=False))
    return Model(
        hf_config=hf_config, weights=weights, frozen=frozenset(), item_bytes=item_bytes, on_gpu=on_gpu
    )


# --- counts and bytes against what is built ---


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_the_model(family: str):
    config = tiny_config(family, tied=family in ("qwen3", "gemma3_text"))
    model = AutoModelForCausalLM.from_config(config)
    assert model_of(config).parameters == sum(one.numel() for one in model.parameters())


@pytest.fixture(scope="module")
def worlds():
    with Worlds() as found:
        yield found


@pytest.fixture(scope="module")
def alone():
    init_world()
    yield
    gc.collect()
    close_world()


def state_of_megatron(trainer) -> tuple[int, int, int]:
    """Return the bytes of a trainer's weights, of its gradients, and of what its optimizer has besides."""
    weights = {p for chunk in trainer.chunks for p in chunk.parameters()}
    buffers = [b for ddp in trainer.ddp for b in (*ddp.buffers, *ddp.expert_parallel_buffers)]
    others = set()
    for part in trainer.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for weight in group["params"]:
                state = part.optimizer.state[weight].values()
                others |= {weight, *(each for each in state if torch.is_tensor(each) and each.dim())}
    places = {p.data.untyped_storage().data_ptr() for p in weights}
    mine = [t for t in others if t.untyped_storage().data_ptr() not in places]
    bytes_of = lambda tensors: sum(t.numel() * t.element_size() for t in tensors)  # noqa: E731
    return bytes_of(weights), sum(b.grad_data.nbytes for b in buffers), bytes_of(mine)


def state_of_fsdp(trainer) -> tuple[int, int, int]:
    parameters = [p._local_tensor for p in trainer.model.parameters()]
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    moments = [moment for _, moment in trainer.optimizer.moments().values()]
    bytes_of = lambda tensors: sum(t.numel() * t.element_size() for t in tensors)  # noqa: E731
    return bytes_of(parameters), bytes_of(p._local_tensor for p in trained), bytes_of(moments)


@pytest.mark.parametrize(
    ("family", "dtype", "moments"),
    [
        ("qwen3", torch.bfloat16, "float32"),
        pytest.param("qwen3", torch.float32, "float32", marks=pytest.mark.slow),
        pytest.param("qwen3", torch.bfloat16, "bfloat16", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", torch.bfloat16, "bfloat16", marks=pytest.mark.slow),
        pytest.param("gpt_oss", torch.bfloat16, "float32", marks=pytest.mark.slow),
    ],
)
def test_bytes_are_those_of_a_megatron_learner(family: str, dtype: torch.dtype, moments: str, alone):
    config, optimizer = tiny_config(family), OptimizerConfig(state_dtype=moments)
    trainer = BACKENDS["megatron"]()(
        config, hf_state(tiny_model(family)), optimizer, dtype=dtype, parallel=UNDIVIDED, lora=NO_LORA
    )
    trainer.train_step(pack(random_samples([9, 7]), 32), TIS, policy_version=3)
    model = model_of(config, item_bytes=dtype.itemsize, on_gpu=False)
    found = learner_rank(model, LearnerConfig(optimizer=optimizer), 1, 32)
    weights, gradients, rest = state_of_megatron(trainer)
    padding = 0.02  # of buffers, to multiples of 64 elements
    assert found.weights == pytest.approx(weights, rel=1e-3)
    assert found.gradients == pytest.approx(gradients, rel=padding)
    assert found.optimizer == pytest.approx(rest, rel=padding)
    assert found.weights + found.optimizer <= checkpoint_bytes(model, LearnerConfig(optimizer=optimizer))


@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, 4])
def test_bytes_are_those_of_an_fsdp_learner(lora: int, alone):
    settings = LearnerConfig.model_validate({"backend": "fsdp", "lora": {"rank": lora} if lora else {}})
    config = tiny_config("qwen3")
    trainer = BACKENDS["fsdp"]()(
        config, hf_state(tiny_model("qwen3")), settings.optimizer, dtype=torch.float32, parallel=UNDIVIDED,
        lora=settings.lora,
    )  # fmt: skip
    trainer.train_step(pack(random_samples([9, 7]), 32), TIS, policy_version=3)
    found = learner_rank(model_of(config, item_bytes=4, on_gpu=False), settings, 1, 32)
    assert (found.weights, found.gradients, found.optimizer) == state_of_fsdp(trainer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "experts"), [("qwen3", False), ("qwen3_moe", True), ("deepseek_v3", False)]
)
def test_adapters_are_those_of_a_megatron_learner(family: str, experts: bool, alone):
    settings = LearnerConfig.model_validate({"lora": {"rank": 4, "experts": experts}})
    config = tiny_config(family)
    trainer = BACKENDS["megatron"]()(
        config, hf_state(tiny_model(family)), settings.optimizer, dtype=torch.float32, parallel=UNDIVIDED,
        lora=settings.lora,
    )  # fmt: skip
    trained = sum(p.numel() for chunk in trainer.chunks for p in chunk.parameters() if p.requires_grad)
    pairs = sum(adapter_elements(one, 4, (), experts=experts) for one in weights_of(config))
    assert pairs == trained


@pytest.mark.parametrize("publish", ["adapter", "merged"])
def test_ranks_that_publish_adapters_compare_these_alone(publish: str):
    settings = LearnerConfig.model_validate({"lora": {"rank": 4, "publish": publish}})
    model = model_of(tiny_config("qwen3"), item_bytes=2, on_gpu=False)
    pairs = sum(adapter_elements(one, 4, (), experts=False) for one in model.weights)
    assert [learner_rank(model, settings, ranks, 32).published for ranks in (1, 2)] == [
        0, pairs if publish == "adapter" else 0
    ]  # fmt: skip


def rank_bytes(family: str, parallel: ParallelConfig) -> tuple[int, int, int]:
    """Return what a rank of a world has; called on every rank."""
    divide_world(parallel)
    trainer = BACKENDS["megatron"]()(
        tiny_config(family, num_hidden_layers=4), hf_state(tiny_model(family, num_hidden_layers=4)),
        OptimizerConfig(), dtype=torch.float32, parallel=parallel, lora=NO_LORA,
    )  # fmt: skip
    return state_of_megatron(trainer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3", {"tensor": 2, "sequence": True}),
        ("qwen3", {"pipeline": 2}),
        ("deepseek_v3", {"tensor": 2, "sequence": True}),
        ("qwen3_moe", {"expert": 2}),
    ],
)
def test_the_fullest_rank_of_a_layout_has_these_bytes(family: str, sizes: dict, worlds):
    parallel = ParallelConfig(**sizes)
    found = worlds.run(2, rank_bytes, family, parallel)
    planned = learner_rank(
        model_of(tiny_config(family, num_hidden_layers=4), item_bytes=4, on_gpu=False),
        LearnerConfig(parallel=parallel), 2, 32,
    )  # fmt: skip
    assert planned.weights == pytest.approx(max(weights for weights, _, _ in found), rel=0.02)
    assert planned.gradients == pytest.approx(max(gradients for _, gradients, _ in found), rel=0.03)


# --- figures of H200s: docs/performance.md, and 8B shapes of November 2026 ---

BFLOAT16 = {"optimizer": {"state_dtype": "bfloat16"}}
FULL = {"parallel": {"recompute": "full"}}
MEASURED = [
    (SMALL, 32768, 1, {}, 51), (SMALL, 16384, 1, {}, 32), (SMALL, 32768, 1, FULL, 15),
    (LARGE, 4096, 1, BFLOAT16, 129), (LARGE, 16384, 1, {**BFLOAT16, **FULL}, 116),
    (SMALL, 32768, 1, {"lora": {"rank": 16}}, 43), (SMALL, 32768, 1, {"optimizer": {"matrices": "muon"}}, 50),
    (SMALL, 16384, 1, {"backend": "fsdp"}, 34),
    (MIXTURE, 16384, 1, {}, 26), (MIXTURE, 16384, 1, {"backend": "fsdp"}, 28),
    (SMALL, 16384, 2, {}, 29), (SMALL, 16384, 2, {"parallel": {"pipeline": 2}}, 26),
    (SMALL, 16384, 2, {"parallel": {"tensor": 2, "sequence": True}}, 17),
    (SMALL, 16384, 2, {"parallel": {"context": 2}}, 23),
    (MIXTURE, 16384, 2, {}, 21), (MIXTURE, 16384, 2, {"parallel": {"expert": 2}}, 26),
]  # fmt: skip
"""Model, tokens of a micro-batch, GPUs, settings, and the peak of a GPU in GiB."""


@pytest.mark.parametrize(("hf_config", "tokens", "gpus", "learner", "measured_gib"), MEASURED)
def test_memory_is_within_a_tenth_of_what_was_measured(hf_config, tokens, gpus, learner, measured_gib):
    found = learner_rank(model_of(hf_config), LearnerConfig.model_validate(learner), gpus, tokens)
    assert found.total / GIB == pytest.approx(measured_gib, rel=0.1)


def run_of(hf_config, directory: Path, **settings: object):
    hf_config.save_pretrained(directory)
    layer = {"model": {"path": directory}, "sampling": {"max_new_tokens": 1024}}
    return resolve({"directory": directory / "runs", "data": {"task": "sort"}, **layer, **settings})


def asked(gpus: int, kind: str = "h200") -> Question:
    return Question(GPUS[kind], gpus, 1024, 1024)


@pytest.mark.parametrize(
    ("hf_config", "learner", "tokens_per_s"),
    [
        (SMALL, {}, 107_000),
        (SMALL, FULL, 90_500),
        (LARGE, {**BFLOAT16, "batch": {"tokens_per_micro_batch": 4096}}, 11_340),
        (LARGE, {**BFLOAT16, **FULL}, 9_120),
        (MIXTURE, {}, 111_600),
    ],
)
def test_a_step_takes_the_measured_time_within_a_fifth(hf_config, learner, tokens_per_s, tmp_path: Path):
    found = plan(run_of(hf_config, tmp_path, learner=learner), hf_config, asked(1))
    assert found.step_tokens / found.step_s == pytest.approx(tokens_per_s, rel=0.2)


# --- what is advised ---


def test_what_does_not_fit_is_told_with_what_does(tmp_path: Path):
    one = plan(run_of(LARGE, tmp_path), LARGE, asked(1))
    assert not one.fits
    assert one.instead[-1] == "--learner.optimizer.state-dtype bfloat16"
    flags = dict(flag.removeprefix("--learner.").split() for flag in one.instead)
    learner: dict = {}
    for name, value in flags.items():
        layer = learner
        *parents, last = name.replace("-", "_").split(".")
        for parent in parents:
            layer = layer.setdefault(parent, {})
        layer[last] = value
    assert plan(run_of(LARGE, tmp_path, learner=learner), LARGE, asked(1)).fits
    small = plan(run_of(LARGE, tmp_path), LARGE, asked(1, "l40s"))
    assert small.instead[-1] == "--learner.lora.rank 16"
    nowhere = replace(GPUS["l40s"], memory_gib=12.0)
    assert plan(run_of(LARGE, tmp_path), LARGE, replace(asked(1), gpu=nowhere)).instead == ()
    two = plan(run_of(LARGE, tmp_path), LARGE, asked(8))
    assert "--learner.parallel.tensor 2" in two.instead
    assert "--learner.world.processes 2" in two.instead


def test_other_gpus_lose_what_they_are_taken_to_lose_besides_torchs_allocator():
    lost = {name: gpu.memory_gib - asked(1, name).room / GIB / 0.985 for name, gpu in GPUS.items()}
    assert (lost["h200"], lost["h100"]) == (pytest.approx(7.8), pytest.approx(7.8))
    for name in ("a100", "b200", "l40s"):
        assert lost[name] / GPUS[name].memory_gib == pytest.approx(7.8 / 139.8, rel=0.02), name


def test_a_shape_that_ran_out_of_an_h200s_memory_does_not_fit(tmp_path: Path):
    learner = {"optimizer": {"state_dtype": "bfloat16"}, "batch": {"tokens_per_micro_batch": 4096}}
    found = plan(run_of(LARGE, tmp_path, learner=learner), LARGE, asked(1))
    assert (found.fits, found.instead) == (False, ("--learner.parallel.recompute full",))


def test_a_model_of_the_hub_that_is_not_here_is_refused_with_what_brings_it():
    with pytest.raises(ConfigError, match=r"org/none is not on this host.*`hf download NAME config\.json`"):
        run_hf_config(resolve({"model": {"path": "org/none"}}))


def test_too_few_gpus_and_layouts_that_do_not_divide_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="8 ranks, and there are 4 GPUs: give --gpus 8"):
        plan(run_of(SMALL, tmp_path, learner={"world": {"processes": 8}}), SMALL, asked(4))
    with pytest.raises(ConfigError, match="does not divide by tensor=3"):
        plan(run_of(SMALL, tmp_path, learner={"parallel": {"tensor": 3}}), SMALL, asked(4))


@pytest.mark.parametrize(
    ("on_gpu", "ranks", "every", "copies"),
    [(True, 1, 1, 2), (False, 2, 1, 2), (False, 1, 10, 1), (False, 1, 1, 0)],
)
def test_a_learner_alone_on_a_cpu_has_no_copy_but_what_deltas_are_made_from(on_gpu, ranks, every, copies):
    learner = LearnerConfig(publication={"snapshot_every": every})
    assert publication_copies(model_of(SMALL, on_gpu=on_gpu), learner, ranks) == copies


def test_engines_have_the_rest_and_the_slower_side_is_waited_for(tmp_path: Path):
    sglang = {"actors": {"engine": {"type": "sglang"}}}
    found = plan(run_of(SMALL, tmp_path, **sglang), SMALL, asked(2))
    assert (found.learner_gpus, found.engine_gpus) == (1, 1)
    assert kv_bytes(SMALL) == 28 * 2 * 8 * 128 * 2
    assert found.kv_tokens == pytest.approx((139.8 * 0.85 * GIB - 2 * found.parameters) / 114688, rel=1e-6)
    assert found.requests == found.kv_tokens // 2048
    waiting = "engines" if found.step_s > found.generation_s else "learner"
    assert found.waits.startswith(f"the {waiting} wait")
    publications = {"snapshot_every": 1}, {}, {"keep_versions": [1]}
    whole, beside, kept = (
        plan(run_of(SMALL, tmp_path, learner={"publication": one}), SMALL, asked(2)) for one in publications
    )
    weights = 2 * found.parameters  # what is written beside may need memory of its own
    assert beside.learner_host - whole.learner_host == pytest.approx(weights, rel=0.01)
    assert kept.learner_host - beside.learner_host == pytest.approx(weights, rel=0.01)
    embedded = plan(run_of(SMALL, tmp_path), SMALL, asked(2))
    assert (embedded.generation_s, embedded.requests) == (None, 0)


def test_the_command_prints_a_screen_and_json_from_config_json_alone(tmp_path: Path, capsys):
    SMALL.save_pretrained(tmp_path)
    command = ["plan", "--model.path", str(tmp_path), "--gpus", "2", "--actors.engine.type", "sglang"]
    with pytest.raises(SystemExit) as ended:
        main(command)
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0
    assert len(lines) <= 15
    assert max(map(len, lines)) <= 130
    with pytest.raises(SystemExit) as ended:
        main([*command, "--gpu-memory-gib", "20", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert ended.value.code == 1
    assert (found["fits"], found["parameters"]) == (False, 596_049_920)
    assert found["instead"][0] == "--learner.parallel.recompute full"
    with pytest.raises(SystemExit):
        main([*command, "--gpu-memory-gib", "20", "--gpu-context-gib", "4", "--json"])
    more = json.loads(capsys.readouterr().out)["room"] - found["room"]
    assert more == pytest.approx(3.8 * 0.985 * GIB)


@pytest.mark.parametrize(("layers", "experts", "token_bytes"), [(0, 0, 13), (48, 128, 397), (48, 384, 781)])
def test_bytes_of_a_token_are_those_of_an_encoded_trajectory(
    layers: int, experts: int, token_bytes: int, tmp_path: Path
):
    width = 2 if experts > 256 else 1
    sizes = [
        len(encode(replace(
            make_trajectory(tokens=tokens),
            routed_experts=bytes((tokens - 1) * layers * 8 * width),
            moe_layers=layers, experts_per_token=8 if layers else 0,
        )))
        for tokens in (1000, 2000)
    ]  # fmt: skip
    assert (sizes[1] - sizes[0]) / 1000 == pytest.approx(token_bytes, abs=0.1)
    mixture = Qwen3MoeConfig(num_hidden_layers=48, num_experts=experts, num_experts_per_tok=8)
    hf_config = mixture if layers else SMALL
    engine = {"type": "sglang", "routed_experts": bool(layers)}
    config = run_of(hf_config, tmp_path, actors={"engine": engine})
    assert trajectory_token_bytes(config, hf_config) == token_bytes


def test_a_start_says_how_many_seconds_of_trajectories_the_streams_hold_and_warns_of_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config, model = run_of(SMALL, tmp_path), tmp_path / "config"
    SMALL.save_pretrained(model)
    on_h200 = held_traffic(config, SMALL, GPUS["h200"])
    step_bytes = (
        13
        * config.sampling.max_new_tokens
        * (config.admission.groups_per_step * config.admission.samples_per_prompt)
    )
    assert on_h200.steps == pytest.approx(GIB / step_bytes)
    at_full_length = replace(asked(1), prompt_tokens=0, answer_tokens=config.sampling.max_new_tokens)
    assert on_h200.seconds == pytest.approx(on_h200.steps * plan(config, SMALL, at_full_length).step_s)
    few = config.model_copy(update={"bus": BusConfig(streams=StreamsConfig(trajectories_mib=16))})
    assert held_traffic(few, SMALL, GPUS["h200"]).remedy
    for started, seconds, said in ((config, 1e3, "hold"), (few, 29.9, "hold_little")):
        held = replace(held_traffic(started, SMALL, None), seconds=seconds)
        monkeypatch.setattr("launch.plan.plan.held_traffic", lambda *_, held=held: held)
        with capture_logs() as logged:
            say_streams(started, model)
        [line] = logged
        assert line["event"] == f"trajectory_streams_{said}"
        assert line["seconds"] == round(seconds)
    enough = int(line["remedy"].split("=")[1].split(",")[0])
    assert enough == math.ceil(16 * 30 / 29.9)


def test_streams_hold_seconds_of_traffic_and_less_than_a_step_is_told_with_the_remedy(tmp_path: Path):
    question = asked(2)
    found = plan(run_of(SMALL, tmp_path, actors={"engine": {"type": "sglang"}}), SMALL, question)
    period_s = max(found.step_s, found.generation_s)
    assert found.stream_s == pytest.approx(period_s * GIB / (13 * found.step_tokens))
    assert not any("LESS THAN" in line for line in plan_lines(found, question))
    small = replace(found, stream_bytes=found.step_bytes - 1)
    [line] = [line for line in plan_lines(small, question) if "LESS THAN" in line]
    assert f"--bus.streams.trajectories-mib {2 * found.step_bytes >> 20}" in line


def test_times_have_three_digits_of_milliseconds_too(tmp_path: Path):
    question = asked(2)
    found = plan(run_of(SMALL, tmp_path, actors={"engine": {"type": "sglang"}}), SMALL, question)
    for training_s, generation_s, told in (
        (0.00123456, 0.0994, "training 1.23 ms at an MFU of 0.50, generation 99.4 ms"),
        (0.0996, 12_345.6, "training 0.0996 s at an MFU of 0.50, generation 12,346 s"),
    ):
        lines = plan_lines(replace(found, step_s=training_s, generation_s=generation_s, mfu=0.5), question)
        assert any(line.endswith(told) for line in lines)
