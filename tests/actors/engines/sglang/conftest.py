"""Engines at a stand-in of an SGLang server."""

import json
from collections.abc import AsyncIterator, Callable

import pytest

from actors.engines.sglang.engine import SglangEngine
from actors.settings.engines import SglangEngineConfig
from tests.actors.sglang_stand_in import StandIn


@pytest.fixture
async def stand_in() -> AsyncIterator[StandIn]:
    stand_in = StandIn()
    await stand_in.start()
    yield stand_in
    await stand_in.close()


@pytest.fixture
async def attach(stand_in: StandIn, tmp_path) -> AsyncIterator[Callable[..., SglangEngine]]:
    """Make engines that are closed at the end; settings may name another server, `served` are adapters."""
    model, made = tmp_path / "model", []
    model.mkdir()
    described = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (model / "config.json").write_text(json.dumps(described))

    def attached(*, served=None, **settings) -> SglangEngine:
        usual = {"url": stand_in.url, "weights_directory": tmp_path / "weights", "start_timeout_s": 5.0}
        config = SglangEngineConfig(**usual | settings)
        made.append(SglangEngine(model, config, tmp_path / "unused.log", served=served))
        return made[-1]

    yield attached
    for engine in made:
        await engine.close()
