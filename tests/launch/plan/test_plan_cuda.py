"""Steps of whole shapes on a GPU, of random weights: their memory and time beside those of the plan.

All together take some 70 s on an H200."""

import gc
import time
from collections.abc import Iterator, Mapping

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3MoeConfig
from transformers.core_model_loading import revert_weight_conversion

from launch.plan.memory import Model, learner_rank
from launch.plan.plan import mfu, step_flops
from launch.plan.sizes import weights_of
from learner.backends.factory import BACKENDS, close_world, init_world
from learner.config.learner import LearnerConfig
from learner.data.packing import pack
from learner.metrics.gpus import GPUS
from learner.model_directories.lazy_weights import LazyWeights, Spec
from tests.learner.tiny import TIS, random_samples

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SEQUENCE, STEPS = 2048, 3
COMMON = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 32768}
SHORT_MOMENTS = {"optimizer": {"state_dtype": "bfloat16"}}
SHAPES: Mapping[str, tuple[PretrainedConfig, int, int, dict]] = {
    "0.6B": (
        Qwen3Config(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                    tie_word_embeddings=True, **COMMON), 16384, 4, {},
    ),
    "1.7B": (
        Qwen3Config(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
                    tie_word_embeddings=True, **COMMON), 16384, 4, {},
    ),
    "4B": (
        Qwen3Config(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
                    tie_word_embeddings=True, **COMMON), 8192, 4, {},
    ),
    "8B": (
        Qwen3Config(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
                    tie_word_embeddings=False, **COMMON), 4096, 8, SHORT_MOMENTS,
    ),
    "30B-A3B, 4 of 48 layers": (
        Qwen3MoeConfig(hidden_size=2048, num_hidden_layers=4, num_attention_heads=32, num_experts=128,
                       num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
                       tie_word_embeddings=False, **(COMMON | {"num_key_value_heads": 4})), 16384, 4, {},
    ),
}  # fmt: skip
"""Configuration, tokens of a micro-batch, micro-batches of a step, and settings of the learner."""


class RandomWeights(LazyWeights):
    """Weights that are drawn on the GPU when they are looked up: no host has room for an 8B in float32."""

    def __init__(self, hf_config: PretrainedConfig) -> None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf_config)
        state = revert_weight_conversion(model, model.state_dict())
        self._shapes = {name: tuple(each.shape) for name, each in state.items()}
        if hf_config.tie_word_embeddings:
            self._shapes.pop("lm_head.weight", None)
        super().__init__(self._shapes)

    def __getitem__(self, name: str) -> torch.Tensor:
        found = torch.empty(self._shapes[name], dtype=torch.bfloat16, device="cuda")
        return found.fill_(1.0) if found.dim() == 1 else found.normal_(0.0, 0.02)

    def spec(self, name: str) -> Spec:
        return Spec(self._shapes[name], torch.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    init_world()
    yield
    gc.collect()
    close_world()


@pytest.mark.parametrize("name", SHAPES)
def test_memory_and_time_of_a_step_are_as_planned(name: str, record_property):
    hf_config, tokens, micro_batches, given = SHAPES[name]
    learner = LearnerConfig.model_validate(given)
    model = Model(
        hf_config=hf_config, weights=weights_of(hf_config), frozen=frozenset(), item_bytes=2, on_gpu=True
    )
    sequences = tokens * micro_batches // SEQUENCE
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    trainer = BACKENDS["megatron"]()(
        hf_config, RandomWeights(hf_config), learner.optimizer, dtype=torch.bfloat16,
        parallel=learner.parallel, lora=learner.lora,
    )  # fmt: skip
    batches = pack(random_samples([SEQUENCE] * sequences), tokens)
    seconds = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        trainer.train_step(batches, TIS, policy_version=3)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated()
    del trainer
    gc.collect()
    torch.cuda.empty_cache()
    planned = learner_rank(model, learner, 1, tokens).total
    step_s = step_flops(hf_config, sequences, SEQUENCE) / (
        GPUS["h200"].peak_flops * mfu(model, learner, 1, micro_batches)
    )
    figures = {
        "peak_gib": peak / 2**30,
        "planned_gib": planned / 2**30,
        "step_s": min(seconds),
        "planned_s": step_s,
    }
    for figure, value in figures.items():
        record_property(figure, round(value, 3))
    print(name, {figure: round(value, 3) for figure, value in figures.items()})  # noqa: T201 - for the table
    assert planned == pytest.approx(peak, rel=0.1)
    assert step_s == pytest.approx(min(seconds), rel=0.2)
