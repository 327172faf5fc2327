"""The SGLang engine over a stand-in of its server: failures and what is sent, without SGLang."""

import asyncio
import json

import pytest
import torch

from actors.config import SglangEngineConfig
from actors.engines.sglang import SglangEngine
from bus.errors import EngineError
from tests.actors.sglang_stand_in import StandIn
from tests.actors.tiny import request

STATE = {"large": torch.ones(64, 8), "small": torch.ones(3)}
TIMEOUT_S = 20.0


@pytest.fixture
async def server():
    server = StandIn()
    await server.start()
    yield server
    await server.close()


@pytest.fixture
def attach(server, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))

    def attached(**settings):
        config = SglangEngineConfig(
            url=server.url, weights_directory=tmp_path / "weights", start_timeout_s=5.0, **settings
        )
        return SglangEngine(model, config, tmp_path / "unused.log")

    return attached


async def has_failed(engine):
    async with asyncio.timeout(TIMEOUT_S):
        while not engine.failure:  # noqa: ASYNC110 - the fleet asks it, too
            await asyncio.sleep(0.02)
    with pytest.raises(EngineError, match="has stopped"):
        await engine.check_health()
    with pytest.raises(EngineError, match="has stopped"):
        await engine.generate(request("late", [1]))
    with pytest.raises(EngineError, match="has stopped"):
        await engine.load_weights(STATE, 9)


async def test_a_server_that_hangs_fails_what_is_in_flight_and_the_engine_for_good(server, attach):
    engine = attach(health_every_s=0.05, health_timeout_s=0.2)
    await engine.start()
    await engine.load_weights(STATE, 0)
    server.running.clear()
    with pytest.raises(EngineError, match=r"did not generate within 0\.2 s, 2 times"):
        await asyncio.wait_for(engine.generate(request("hangs", [1])), TIMEOUT_S)
    await has_failed(engine)
    server.running.set()
    await engine.close()


async def test_a_server_that_does_not_take_weights_fails_the_engine(server, attach):
    engine = attach()
    await engine.start()
    await engine.load_weights(STATE, 0)
    server.refuses_weights = True
    with pytest.raises(EngineError, match=r"did not take policy version 1: .*out of memory"):
        await engine.load_weights(STATE, 1)
    await has_failed(engine)
    assert engine.policy_version == 0
    await engine.close()


async def test_a_server_that_is_away_is_waited_for_and_then_named(server, attach):
    engine = attach(health_timeout_s=1.0)
    await server.close()
    engine._server._config = engine._config.model_copy(update={"start_timeout_s": 0.3})
    with pytest.raises(EngineError, match="no answer from an SGLang server at"):
        await asyncio.wait_for(engine.start(), TIMEOUT_S)
    await engine.close()


@pytest.mark.parametrize("update", ["disk", "tensor"])
async def test_a_version_without_a_changed_tensor_reaches_the_server(server, attach, update):
    engine = attach(update=update)
    await engine.start()
    with pytest.raises(EngineError, match="the first weights of an engine must be all of them"):
        await engine.load_weights({}, 0)
    await engine.load_weights(STATE, 0)
    await engine.load_weights({}, 1)
    generation = await engine.generate(request("after", [1], new=4))
    await engine.close()
    assert generation.policy_versions.tolist() == [1] * 4
    assert server.versions == ["0", "1"]


async def test_a_server_that_was_left_in_an_update_goes_on_when_an_engine_attaches(server, attach):
    server.running.clear()
    server.updating = True
    engine = attach(update="tensor")
    await asyncio.wait_for(engine.start(), TIMEOUT_S)
    await engine.load_weights(STATE, 0)
    assert not server.updating
    assert len((await engine.generate(request("after", [1], new=4))).token_ids) == 4
    await engine.close()
