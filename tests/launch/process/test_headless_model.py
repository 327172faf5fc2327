"""A head that is to be trained is looked for in the model's configuration, before anything is loaded."""

import json

import pytest

from bus.errors import ConfigError
from launch.config import resolve
from launch.process.model_directory import refuse_headless_model


def test_a_head_that_the_model_does_not_have_is_refused_before_anything_starts(tmp_path):
    layers = {"model": {"path": str(tmp_path)}}, {"learner": {"mtp": {"weight": 0.2}}}
    config = resolve(*layers)
    refuse_headless_model(config)  # what is not here, the learner will see
    for described in (
        {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1},
        {"model_type": "glm4_moe"},
        {"model_type": "qwen3_next"},
        {"hidden_size": 8},
    ):
        (tmp_path / "config.json").write_text(json.dumps(described))
        refuse_headless_model(config)
    for described, said in (
        ({"model_type": "deepseek_v3", "num_nextn_predict_layers": 0}, "a deepseek_v3 with .*_layers=0, has"),
        ({"model_type": "deepseek_v3", "num_nextn_predict_layers": None}, "_layers=0, has no head"),
        ({"model_type": "glm4_moe", "num_nextn_predict_layers": 2}, "_layers=2, has no head"),
        ({"model_type": "qwen3_moe"}, "learner.mtp.weight=0.2: the model, a qwen3_moe with .*_layers=0"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(described))
        with pytest.raises(ConfigError, match=said):
            refuse_headless_model(config)
        refuse_headless_model(resolve(layers[0]))
