"""A run that trains the head of a DeepSeek-V3 for the token after the next beside the policy."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config

from tests.e2e.commands import records_of_run
from tests.e2e.test_kill import trained_again
from tests.e2e.test_router_replay_run import MODELS, SMALL, written

pytestmark = [pytest.mark.nats, pytest.mark.nightly]
LAYER = "model.layers.2."
MTP = ("--learner.mtp.weight", "0.2", "--learner.mtp.lr-factor", "10", "--learner.checkpoint.save-every", "2")


def with_head(tmp_path: Path) -> Path:
    """A model of two layers whose head's layer is the third of a larger one."""
    sizes = MODELS["deepseek"].to_dict()
    larger = written(DeepseekV3Config.from_dict(sizes | {"num_hidden_layers": 3}), tmp_path / "larger")
    path = written(DeepseekV3Config.from_dict(sizes | {"num_nextn_predict_layers": 1}), tmp_path / "model")
    torch.manual_seed(1)
    head = {n: t for n, t in load_file(larger / "model.safetensors").items() if n.startswith(LAYER)}
    head |= {f"{LAYER}{name}.weight": torch.ones(64) for name in ("enorm", "hnorm", "shared_head.norm")}
    head |= {f"{LAYER}eh_proj.weight": torch.randn(64, 128) * 128**-0.5}
    file = path / "model.safetensors"
    save_file({**load_file(file), **head}, file, metadata={"format": "pt"})
    return path


def test_a_run_trains_publishes_and_exports_the_head_and_is_trained_again_alike(tmp_path: Path):
    path = with_head(tmp_path)
    records = records_of_run(tmp_path, *SMALL, *MTP, "--model.path", str(path))
    directory = tmp_path / "runs/sort"
    stages = {stage: [r for r in records if r.get("train/stage") == stage] for stage in ("warmup", "rl")}
    assert all(0 <= each["policy/mtp_correct_fraction"] <= 1 for each in stages["rl"])
    losses = [each["policy/mtp_loss_nats"] for each in stages["warmup"]]
    assert len(losses) == 40
    assert losses[-1] < 0.7 * losses[0]
    before, after = (load_file(each / "model.safetensors") for each in (path, directory / "export"))
    assert before.keys() == after.keys()
    moved = {name for name in before if not before[name].to(after[name].dtype).equal(after[name])}
    assert {f"{LAYER}{name}.weight" for name in ("enorm", "eh_proj", "shared_head.norm")} <= moved
    report = trained_again(tmp_path)
    assert report["first_step_that_differs"] is None
    assert report["weights_max_abs_diff"] == 0  # those of the head, too
