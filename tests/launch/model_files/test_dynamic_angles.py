"""A model whose angles SGLang scales otherwise than the learner is refused wherever SGLang would serve it."""

import asyncio
import json
from pathlib import Path

import pytest

from actors.engines.fleet.build import build_engine, refuse_unfit_model
from actors.evaluation.dedicated import beside_rollouts
from actors.settings.actors import ActorsConfig
from actors.settings.engines import EmbeddedEngineConfig, SglangEngineConfig
from bus.errors import ConfigError
from launch.checks.start_checks import rehearse_local
from launch.model_files.model_directory import refuse_other_angles
from launch.settings.run_config import resolve

REFUSED = "SGLang scales angles of the rope_type 'dynamic' in sequences of an"
SGLANG = {"actors": {"engine": {"type": "sglang"}}}
SERVERS = {"actors": {"evaluation": {"servers": 1}}}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


def described(model: Path, **config: object) -> Path:
    (model / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_parameters": DYNAMIC},
        {"rope_scaling": {"type": "dynamic"}},
        {"text_config": {"rope_parameters": {"sliding_attention": {}, "full_attention": DYNAMIC}}},
    ],
)
def test_no_engine_of_sglang_is_built_for_them(tmp_path, scaling):
    model = described(tmp_path, **scaling)
    with pytest.raises(ConfigError, match=REFUSED):
        refuse_unfit_model(SglangEngineConfig(), model)
    refuse_unfit_model(EmbeddedEngineConfig(), model)
    with pytest.raises(ConfigError, match=REFUSED):  # as of servers that join
        build_engine(SglangEngineConfig(), model, tmp_path / "log")
    with pytest.raises(ConfigError, match=REFUSED):  # before the first evaluation
        beside_rollouts(ActorsConfig.model_validate(SERVERS["actors"]), model, tmp_path, actor="a")
    beside_rollouts(ActorsConfig(), model, tmp_path, actor="a")


def test_they_are_refused_before_anything_starts(tmp_path):
    model = {"model": {"path": str(tmp_path)}}
    refuse_other_angles(resolve(model, SGLANG))  # what is not here, the actors will see
    described(tmp_path, model_type="llama", rope_parameters=DYNAMIC)
    for served in (SGLANG, SERVERS):
        with pytest.raises(ConfigError, match=REFUSED):
            refuse_other_angles(resolve(model, served))
        refuse_other_angles(resolve(served))
    refuse_other_angles(resolve(model))
    described(tmp_path, model_type="llama", rope_parameters={"rope_type": "yarn", "factor": 2.0})
    refuse_other_angles(resolve(model, SGLANG))


async def test_a_dry_run_refuses_them(tmp_path):
    described(tmp_path, model_type="llama", rope_parameters=DYNAMIC)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "1 + 1?", "label": "2"}) + "\n")
    layer = {"directory": tmp_path / "runs", "data": {"prompts": prompts}, "model": {"path": str(tmp_path)}}
    with pytest.raises(ConfigError, match=REFUSED):
        await rehearse_local(resolve(layer, SERVERS), asyncio.Event(), own_bus=True)
