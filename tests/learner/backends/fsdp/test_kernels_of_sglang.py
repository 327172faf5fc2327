"""SGLang's kernels are called as their server calls them: `pytest -m sglang`, in Triton's interpreter."""

import json
import subprocess
from pathlib import Path

import pytest

from actors.engines.sglang.server.settings import interpreter
from actors.settings.engines import SglangEngineConfig

SCRIPT = Path(__file__).with_name("run_kernels_of_sglang.py")
ROUNDING = {"log_softmax": 2e-6, "prefill": 2e-3, "decode": 2e-3}


@pytest.mark.sglang
def test_sglangs_kernels_compute_attention_and_log_probs_of_packs():
    ran = subprocess.run(
        [interpreter(SglangEngineConfig()), SCRIPT], capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found.pop("decoded") == 44
    assert found.pop("bits") == dict.fromkeys(("residual", "norm", "norm_of_heads", "rotation"), True)
    assert found.keys() == ROUNDING.keys()
    for name, difference in found.items():
        assert difference < ROUNDING[name], name
