"""What is counted for a learner that balances its ranks by work."""

import json

import pytest

from launch.config import RunConfig
from launch.process.vision_checks import counts_images


def config_of(directory, *, balance: str = "flops", **model) -> RunConfig:
    return RunConfig.model_validate(
        {"directory": directory, "model": model, "learner": {"batch": {"balance": balance}}}
    )


@pytest.mark.parametrize(("kind", "counted"), [("qwen3_vl", True), ("qwen3", False), (None, True)])
def test_images_are_counted_for_models_that_may_see_some(tmp_path, kind, counted):
    model = tmp_path / "model"
    model.mkdir()
    if kind is not None:  # else it is on another host
        (model / "config.json").write_text(json.dumps({"model_type": kind}))
    assert counts_images(config_of(tmp_path, path=str(model))) is counted


@pytest.mark.parametrize(("layers", "balance"), [(1, "flops"), (1, "tokens"), (0, "flops")])
def test_images_are_counted_for_a_scratch_model_with_a_tower_and_for_work_alone(tmp_path, layers, balance):
    config = config_of(tmp_path, balance=balance, scratch={"vision": {"layers": layers}})
    assert counts_images(config) is (layers == 1 and balance == "flops")
