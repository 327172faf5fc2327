"""Exact arithmetic on a GPU: the learner there and the embedded engine on a CPU agree to the bit."""

import pytest
import torch

from actors.engines.embedded.prepared_weights import prepare_weights
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.megatron.trainer import Trainer
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import pack
from tests.learner.exact import decoder_of, differences, finished, random_requests, trained_sample
from tests.learner.tiny import TIS, hf_state, random_samples, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
@pytest.mark.parametrize("backend", [FsdpTrainer, Trainer])
def test_a_learner_on_a_gpu_and_an_engine_on_a_cpu_agree_to_the_bit(backend, family):
    model = tiny_model(family)
    learner = backend(model.config, hf_state(model), OptimizerConfig(lr=1e-2), exact=True)
    decoder = decoder_of(model.config)
    for version in range(3):
        state = {name: tensor.cpu() for name, tensor in learner.export().items()}
        decoder.swap_weights(prepare_weights(decoder.model, state, complete=version == 0), version)
        sampled = finished(decoder, random_requests(20, seed=version))
        for budget in (1, 130, 5000):
            assert not differences(learner, sampled, version, budget).any(), (version, budget)
        samples = [trained_sample(*each) for each in sampled]
        result = learner.train_step(pack(samples, 150), TIS, policy_version=version)
        assert result.diagnostics["mismatch_nats"] == 0.0
        learner.train_step(pack(random_samples([40, 17]), 100), TIS, policy_version=version)
