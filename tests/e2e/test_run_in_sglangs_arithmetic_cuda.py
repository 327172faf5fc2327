"""A whole run on one GPU whose learner computes as its SGLang server does (`pytest -m gpu tests/e2e`).

It needs SGLang in the learner's environment; the server is of `.venv-sglang`, where that exists."""

from pathlib import Path

import pytest
import tomli_w
import torch

from actors.engines.sglang.server.settings import BUILT_HERE
from tests.actors.cuda import SERVER
from tests.e2e.commands import records_of_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.nats,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.timeout(900),
]
STEPS = 4
RUN = (
    "--preset", "sort", "--model.numerics", "sglang", "--model.dtype", "bfloat16",
    "--model.scratch.hidden-size", "512", "--model.scratch.heads", "8", "--model.scratch.kv-heads", "4",
    "--warmup.steps", "50", "--admission.max-staleness", "0", "--admission.groups-per-step", "4",
    "--admission.samples-per-prompt", "4", "--evaluation.every-versions", "0",
    "--learner.backend", "fsdp", "--learner.publish-dtype", "bfloat16", "--learner.steps", str(STEPS),
    "--learner.target-accuracy", "none", "--learner.entropy-coef", "0.1",
)  # fmt: skip
ENGINE = {"server": SERVER | {"mem_fraction_static": 0.2}} | (
    {"python": str(BUILT_HERE)} if BUILT_HERE.is_file() else {}
)


def test_each_log_prob_of_a_synchronous_run_has_the_bits_of_the_servers(tmp_path: Path):
    pytest.importorskip("sglang")
    (tmp_path / "run.toml").write_text(tomli_w.dumps({"actors": {"engine": {"type": "sglang"} | ENGINE}}))
    records = records_of_run(tmp_path, *RUN, "--config", "run.toml", within_s=600)
    steps = [each for each in records if each.get("train/stage") == "rl"]
    assert [each["policy/bit_equal_fraction"] for each in steps] == [1.0] * STEPS
    assert [each["policy/mismatch_nats"] for each in steps] == [0.0] * STEPS
    assert [each["policy/importance_ratio"] for each in steps] == [1.0] * STEPS
    assert min(each["train/grad_norm"] for each in steps) > 0
