import subprocess
import sys

import pytest
import torch

from bus.errors import ConfigError
from learner.backends.megatron.core.patches import MODULES_NAMING_CUDA, adapt_megatron_to_cpu

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


@pytest.mark.nightly
@pytest.mark.slow
def test_a_learner_starts_without_what_it_does_not_use():
    libraries = ("torch._dynamo", "torch._inductor", "transformers.modeling_utils", "wandb", "megatron.core")
    loaded = f"[name for name in {libraries} if name in sys.modules]"
    program = f"import sys; import learner.run.service; print({loaded})"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "['megatron.core']"
