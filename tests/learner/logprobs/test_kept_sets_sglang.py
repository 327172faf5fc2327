"""What a real SGLang draws with tokens cut off is on-policy for the learner, on a CPU."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actors.engines.base import Generation, GenerationRequest, Sampling
from actors.engines.sglang.engine import SglangEngine
from actors.policy.cut_off_sampling import told_by
from actors.settings.actors import SamplingConfig
from actors.settings.engines import SglangEngineConfig
from learner.backends.megatron.core.process_groups import divide_world
from learner.backends.megatron.trainer import Trainer
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.data.packing import Sample
from learner.logprobs.logprobs import score
from tests.actors.sglang_served import CONFIG, FIRST

pytestmark = [pytest.mark.sglang, pytest.mark.nightly, pytest.mark.timeout(420)]
CUTS = (
    Sampling(temperature=0.8, top_p=0.7, keep_masks=True, max_new_tokens=60),
    Sampling(top_k=3, keep_masks=True, max_new_tokens=60),
    Sampling(temperature=1.3, min_p=0.2, top_k=20, top_p=0.95, keep_masks=True, max_new_tokens=60),
    Sampling(max_new_tokens=60),
)
PROMPT = [1, 7, 30, 12]


async def generated(directory: Path) -> list[Generation]:
    config = SglangEngineConfig(**CONFIG, stream_interval=16)
    config = told_by(config, SamplingConfig(top_p=0.7, keep_masks=True))
    engine = SglangEngine(directory / "model", config, directory / "engine.log")
    try:
        await engine.start()
        await engine.load_weights(dict(FIRST.state_dict()), 1)
        requests = [GenerationRequest(str(n), PROMPT, cut) for n, cut in enumerate(CUTS)]
        return list(await asyncio.gather(*(engine.generate(each) for each in requests)))
    finally:
        await engine.close()


def test_the_learner_gives_every_token_the_log_prob_that_sglang_drew_it_with(tmp_path):
    FIRST.save_pretrained(tmp_path / "model")
    found = asyncio.run(generated(tmp_path))
    assert [each.kept is not None for each in found] == [True, True, True, False]
    assert found[1].kept.counts.tolist() == [3] * 60
    samples = [
        Sample(
            token_ids=np.array([*PROMPT, *each.token_ids], np.int32),
            loss_mask=np.arange(len(PROMPT) + 60) >= len(PROMPT),
            streams={"temperatures": cut.temperature},
            kept=None
            if each.kept is None
            else type(each.kept).joined([type(each.kept).none(len(PROMPT)), each.kept]),
        )
        for each, cut in zip(found, CUTS, strict=True)
    ]
    divide_world(ParallelConfig())
    trainer = Trainer(FIRST.config, dict(FIRST.state_dict()), OptimizerConfig())

    def distances(samples: list[Sample]) -> list[float]:
        scores = score(trainer, samples, tokens_per_micro_batch=1000)
        return [
            float(np.abs(each.logprobs[len(PROMPT) :] - generation.logprobs).max())
            for each, generation in zip(scores, found, strict=True)
        ]

    assert max(distances(samples)) < 1e-4
    without = distances([replace(sample, kept=None) for sample in samples])
    assert min(without[:3]) > 0.05  # what kept sets are for
