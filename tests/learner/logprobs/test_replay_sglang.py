"""What router replay does to the mismatch with a real SGLang that computes in bfloat16, on a CPU."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from actors.engines.base import Generation
from actors.engines.sglang.engine import SglangEngine
from actors.settings.engines import SglangEngineConfig
from learner.backends.megatron.trainer import Trainer
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.data.packing import Sample
from learner.logprobs.logprobs import score
from tests.actors.sglang_served import CONFIG
from tests.actors.tiny import request
from tests.learner.division import divide_world

pytestmark = [pytest.mark.sglang, pytest.mark.nightly, pytest.mark.timeout(420)]
PROMPTS = [[1 + n, 7, 30 - n, 12] for n in range(16)]


def mixture(directory: Path) -> Qwen3MoeForCausalLM:
    """A random model of 4 layers whose tokens go to 4 of 16 experts, with weights of bfloat16."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=16, num_experts_per_tok=4,
        norm_topk_prob=True, max_position_embeddings=512, tie_word_embeddings=False, initializer_range=0.1,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    model.save_pretrained(directory)
    return model


async def generated(directory: Path, log: Path) -> list[Generation]:
    engine = SglangEngine(directory, SglangEngineConfig(**CONFIG, routed_experts=True), log)
    requests = [replace(request(str(n), prompt, new=100), experts_from=0) for n, prompt in enumerate(PROMPTS)]
    try:
        await engine.start()
        await engine.load_weights(load_file(directory / "model.safetensors"), 1)
        return list(await asyncio.gather(*(engine.generate(each) for each in requests)))
    finally:
        await engine.close()


def distance(trainer: Trainer, samples: list[Sample]) -> float:
    """Mean |log ratio| of the sampled tokens, nats."""
    found = score(trainer, samples, tokens_per_micro_batch=1000)
    return float(
        np.mean([
            np.abs(scores.logprobs - sample.streams["behaviour_logprobs"])[sample.loss_mask].mean()
            for scores, sample in zip(found, samples, strict=True)
        ])
    )  # fmt: skip


def test_replayed_experts_are_nearer_to_what_sglang_sampled_from(tmp_path, capsys):
    model = mixture(tmp_path / "model")
    generations = asyncio.run(generated(tmp_path / "model", tmp_path / "engine.log"))
    samples = [
        Sample(
            token_ids=np.array([*prompt, *found.token_ids], np.int32),
            loss_mask=np.arange(len(prompt) + 100) >= len(prompt),
            streams={
                "behaviour_logprobs": np.append(np.zeros(len(prompt), np.float32), found.logprobs),
                "temperatures": 1.0,
            },
            experts=found.routed_experts,
        )
        for prompt, found in zip(PROMPTS, generations, strict=True)
    ]
    divide_world(ParallelConfig())
    state = {name: each.float() for name, each in load_file(tmp_path / "model/model.safetensors").items()}
    trainer = Trainer(model.config, state, OptimizerConfig())
    own = distance(trainer, [replace(sample, experts=None) for sample in samples])
    replayed = distance(trainer, samples)
    with capsys.disabled():
        sys.stdout.write(
            f"\nmean |log ratio|: {own:.4f} nats with the learner's routing, {replayed:.4f} with the engine's"
        )
    assert replayed < 0.9 * own
