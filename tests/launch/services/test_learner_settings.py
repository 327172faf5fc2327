"""By which settings a learner trains when storage announces others before the learner has its role."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from bus.connection.bus import Bus
from bus.errors import BusAwayError, leaves
from bus.messages import RunRecord
from launch.services import learner
from launch.settings.run_config import RunConfig, validate

pytestmark = pytest.mark.nats


def definition(lr: float) -> RunRecord:
    config = validate({"run": "test", "learner": {"optimizer": {"lr": lr}}, "data": {"task": "sort"}})
    return RunRecord(name="test", config_json=config.model_dump_json())


@pytest.mark.parametrize("is_rank", [False, True])
async def test_a_learner_whose_settings_become_others_before_it_begins_joins_again(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_rank: bool
):
    loop, prepared, trained = asyncio.get_running_loop(), [], []

    def settings(config: RunConfig, _: object) -> tuple[SimpleNamespace, None]:
        """Storage is started with other settings while the learner fetches its model, say."""
        prepared.append(config.learner.optimizer.lr)
        asyncio.run_coroutine_threadsafe(bus.put("run", definition(5e-4)), loop).result(timeout=60)
        return SimpleNamespace(model_directory=tmp_path, lr=config.learner.optimizer.lr), None

    async def run(_: Bus, found: SimpleNamespace, *__: object, **___: object) -> None:
        trained.append(found.lr)

    monkeypatch.setattr(learner, "learner_settings", settings)
    monkeypatch.setattr(learner, "say_streams", lambda *_: None)
    monkeypatch.setattr("learner.run.service.run", run)
    await bus.put("run", definition(1e-4))
    url = bus.client.connected_url.geturl()
    where = validate({"run": "test", "directory": str(tmp_path), "bus": {"url": url}})
    serving = learner.serve_learner(where, {}, asyncio.Event(), is_rank=is_rank)
    if is_rank:
        with pytest.raises(Exception, match="other settings") as raised:
            await serving
        assert any(isinstance(error, BusAwayError) for error in leaves(raised.value))
    else:
        await serving
    assert (prepared, trained) == (([1e-4], []) if is_rank else ([1e-4, 5e-4], [5e-4]))
