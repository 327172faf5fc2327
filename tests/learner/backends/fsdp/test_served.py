"""What this backend publishes of a family that only it trains, in the embedded engine."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from actors.engines.base import GenerationRequest, Sampling
from actors.engines.embedded.engine import EmbeddedEngine
from actors.settings.engines import EmbeddedEngineConfig
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import Sample, micro_batch_of, pack
from tests.learner.backends.fsdp.families import family_model
from tests.learner.tiny import TIS, hf_state, random_samples

ENGINE = EmbeddedEngineConfig(dtype="float32")


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize("family", ["llama with scaled rope", "gemma3", "gpt_oss"])
async def test_the_engine_gives_published_weights_the_learners_logprobs(tmp_path: Path, family: str):
    model = family_model(family)
    trainer = FsdpTrainer(model.config, hf_state(model), OptimizerConfig(lr=1e-2))
    [sample] = random_samples([40])
    trainer.train_step(pack([sample], 100), TIS, policy_version=0)
    model.config.save_pretrained(tmp_path)
    engine = EmbeddedEngine.from_directory(tmp_path, ENGINE)
    await engine.start()
    try:
        await engine.load_weights(trainer.export(), 1)
        [served] = await engine.score([sample.token_ids.tolist()])
    finally:
        await engine.close()
    [[learned, _]] = trainer.logprobs(pack([sample], 100))
    trained = sample.loss_mask[1:]
    assert np.abs(np.array(served)[trained] - learned.numpy()[:-1][trained]).max() < 1e-5


async def test_tokens_that_the_engine_samples_have_the_learners_logprobs_also_where_layers_keep_a_state(
    tmp_path: Path,
):
    model = family_model("qwen3_next")
    trainer = FsdpTrainer(model.config, hf_state(model), OptimizerConfig(lr=1e-2))
    trainer.train_step(pack(random_samples([40, 20]), 100), TIS, policy_version=0)
    model.config.save_pretrained(tmp_path)
    engine = EmbeddedEngine.from_directory(tmp_path, ENGINE)
    prompts = ([3, 4, 5, 6, 7], [8, 9], [10], [11, 12, 13, 14, 15])
    await engine.start()
    try:
        await engine.load_weights(trainer.export(), 1)
        requests = [
            GenerationRequest(str(n), prompt, Sampling(max_new_tokens=20 + n))
            for n, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(*[engine.generate(request) for request in requests])
    finally:
        await engine.close()
    samples = [
        Sample(
            token_ids=np.array([*prompt, *answer.token_ids], np.int32),
            loss_mask=np.arange(len(prompt) + len(answer.token_ids)) >= len(prompt),
            streams={},
        )
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    [[learned, _]] = trainer.logprobs([micro_batch_of(samples)])
    served = np.concatenate([answer.logprobs for answer in answers])
    assert np.abs(served - learned.numpy()[~np.isnan(learned.numpy())]).max() < 3e-5
