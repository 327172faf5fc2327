"""What is refused for a vision-language model, and what is counted for ranks that are balanced by work."""

import json

import pytest

from bus.errors import ConfigError
from launch.model_files.vision_checks import counts_images, refuse_unfit_vision
from launch.settings.run_config import RunConfig


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


def vision_run(directory, kind: str, **settings) -> RunConfig:
    (directory / "config.json").write_text(json.dumps({"model_type": kind}))
    learner = {"backend": "fsdp", **settings.pop("learner", {})}
    return RunConfig.model_validate(
        {"directory": directory, "model": {"path": str(directory)}, "learner": learner, **settings}
    )


@pytest.mark.parametrize("evaluation", [{"servers": 1}, {"urls": ["http://a:1"]}])
def test_sglang_does_not_evaluate_a_model_that_it_would_show_other_images(tmp_path, evaluation):
    actors = {"engine": {"type": "embedded"}, "evaluation": evaluation}
    with pytest.raises(ConfigError, match=r"qwen2_5_vl .* leave out actors\.evaluation\.servers and urls"):
        refuse_unfit_vision(vision_run(tmp_path, "qwen2_5_vl", actors=actors))
    refuse_unfit_vision(vision_run(tmp_path, "qwen2_5_vl"))
    refuse_unfit_vision(vision_run(tmp_path, "qwen3_vl", actors=actors))


def test_adapters_of_a_family_whose_files_have_other_names_are_refused_before_anything_is_loaded(tmp_path):
    adapters = {"lora": {"rank": 4}}
    with pytest.raises(ConfigError, match=r"learner\.lora\.rank=4: files of a qwen2_5_vl .* set it to 0"):
        refuse_unfit_vision(vision_run(tmp_path, "qwen2_5_vl", learner=adapters))
    refuse_unfit_vision(vision_run(tmp_path, "qwen3_vl", learner=adapters))
