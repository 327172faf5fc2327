"""Runs that train a model's head for the token after the next beside the policy."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.commands import records_of_run, trained_again
from tests.e2e.small_mixtures import MODELS, SMALL, written

pytestmark = [pytest.mark.nats, pytest.mark.nightly]
DONOR = "model.layers.2."
"""Begins the names of the layer of a larger model that becomes the head's."""
BEHIND = ("enorm", "hnorm", "shared_head.norm", "eh_proj")
APART = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")
HEADS = {"deepseek": (DONOR, DONOR, BEHIND), "qwen3_5_moe": ("mtp.layers.0.", "mtp.", APART)}
"""Beginnings of the names of a head's layer and of what it has beside that, and the rest of the latter: three
norms and the projection."""
MTP = ("--learner.mtp.weight", "0.2", "--learner.mtp.lr-factor", "10", "--learner.checkpoint.save-every", "2")


def with_head(kind: str, tmp_path: Path) -> Path:
    """A model of two layers whose head's layer is the third of a larger one."""
    sizes, family = MODELS[kind].to_dict(), type(MODELS[kind])
    more = {"num_hidden_layers": 3}
    one = {"num_nextn_predict_layers": 1}
    if kind == "qwen3_5_moe":
        more["layer_types"] = [*sizes["layer_types"], "full_attention"]
        one = {}  # the names of the weights tell
    larger = written(family.from_dict(sizes | more), tmp_path / "larger")
    path = written(family.from_dict(sizes | one), tmp_path / "model")
    layer, own, (*norms, projection) = HEADS[kind]
    torch.manual_seed(1)
    weights = load_file(larger / "model.safetensors")
    head = {layer + n.removeprefix(DONOR): t for n, t in weights.items() if n.startswith(DONOR)}
    centre = 0.0 if kind == "qwen3_5_moe" else 1.0
    head |= {f"{own}{name}.weight": torch.full((64,), centre) for name in norms}
    head |= {f"{own}{projection}.weight": torch.randn(64, 128) * 128**-0.5}
    file = path / "model.safetensors"
    save_file({**load_file(file), **head}, file, metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("kind", [*HEADS])
def test_a_run_trains_publishes_and_exports_the_head_and_is_trained_again_alike(tmp_path: Path, kind: str):
    path = with_head(kind, tmp_path)
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
    _, own, names = HEADS[kind]
    assert {f"{own}{name}.weight" for name in names} <= moved
    report = trained_again(tmp_path)
    assert report["first_step_that_differs"] is None
    assert report["weights_max_abs_diff"] == 0  # those of the head, too
