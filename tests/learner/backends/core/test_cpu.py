import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bus.errors import ConfigError
from learner.backends.megatron.core.patches import MODULES_NAMING_CUDA, adapt_megatron_to_cpu
from learner.backends.megatron.trainer import Trainer
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import pack
from tests.learner.tiny import TIS, hf_state, random_samples, tiny_model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is adapted where CUDA exists")


def test_adapting_again_does_nothing():
    adapt_megatron_to_cpu()


def test_another_megatron_is_refused(monkeypatch):
    monkeypatch.setattr("megatron.core.__version__", "9.9.9")
    with pytest.raises(ConfigError, match=r"found 9\.9\.9: install megatron-core==0\.16\.1"):
        adapt_megatron_to_cpu.__wrapped__()


def test_a_module_that_names_no_cuda_is_reported():
    # everything is adapted by now, so to a second pass the first module looks like one that drifted
    with pytest.raises(ConfigError, match=MODULES_NAMING_CUDA[0]):
        adapt_megatron_to_cpu.__wrapped__()


def test_torch_itself_is_left_alone():
    assert torch.cuda.current_device.__module__ == "torch.cuda"
    assert torch.cuda.synchronize.__module__ == "torch.cuda"
    assert torch.compile.__module__ == "torch"


class Exchanges(TorchDispatchMode):
    """Notes what ranks exchange."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.namespace == "c10d":
            self.names.add(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


def test_a_rank_alone_exchanges_no_gradients_and_no_weights():
    model = tiny_model("llama")
    trainer = Trainer(model.config, hf_state(model), OptimizerConfig(lr=1e-2))
    before = trainer.export()
    with Exchanges() as exchanges:
        trainer.train_step(pack(random_samples([5, 9]), 40), TIS, policy_version=0)
    assert not {name for name in exchanges.names if "scatter" in name or "gather" in name}
    assert any(not torch.equal(before[name], weight) for name, weight in trainer.export().items())


@pytest.mark.nightly
@pytest.mark.slow
def test_a_learner_starts_without_what_it_does_not_use():
    libraries = ("torch._dynamo", "torch._inductor", "transformers.modeling_utils", "wandb", "megatron.core")
    loaded = f"[name for name in {libraries} if name in sys.modules]"
    program = f"import sys; import learner.run.service; print({loaded})"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "['megatron.core']"
