"""Parts of `launch local` join by what its own storage announces, never by what an earlier launch left."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rich.console import Console

from bus.connection.bus import Bus
from bus.errors import ConfigError
from bus.messages import RunRecord
from launch.local import local
from launch.local.supervisor import Part, Supervisor
from launch.run_view.monitor import RunMonitor, RunSettings
from launch.settings.run_config import resolve, validate
from storage.disk.atomic_files import write_json
from storage.disk.run_directory import RunDirectory
from tests.storage.serving import until

pytestmark = pytest.mark.nats


def definition(lr: float) -> RunRecord:
    config = validate({"run": "test", "learner": {"optimizer": {"lr": lr}}, "data": {"task": "sort"}})
    return RunRecord(name="test", config_json=config.model_dump_json())


async def test_on_a_bus_that_has_a_definition_other_parts_start_once_storage_has_announced_another(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = validate({"run": "test", "bus": {"url": bus.client.connected_url.geturl()}})
    run = RunDirectory(tmp_path, "test")
    begins = f"cd {tmp_path}; touch $0; sleep 0.3; touch $0-goes-on; sleep 60"
    parts = [Part(name, ("sh", "-c", begins, name)) for name in ("storage", "actors")]
    monkeypatch.setattr(local, "_run_parts", lambda *_: parts)
    await bus.put("run", definition(1e-4))
    parts_of = (
        config,
        run,
        Supervisor(run.logs),
        RunMonitor(RunSettings.of_run(config)),
        Console(quiet=True),
    )
    stop, entered = asyncio.Event(), asyncio.Event()

    async def enter() -> None:
        async with local._parts(*parts_of, stop, own_bus=False):
            entered.set()
            await stop.wait()

    entering = asyncio.create_task(enter())
    await until((tmp_path / "storage-goes-on").exists)
    await bus.delete("run")  # as storage does before it announces its own
    assert not (tmp_path / "actors").exists()
    await bus.put("run", definition(5e-4))
    await until((tmp_path / "actors").exists)
    await entered.wait()
    stop.set()
    await entering


@pytest.mark.parametrize("own_bus", [True, False])
async def test_settings_that_storage_may_refuse_are_not_those_of_the_run_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_bus: bool
):
    """An actor of another host may live, by which they are refused: screens show what was announced."""
    run, console = RunDirectory(tmp_path, "test"), Console(quiet=True)
    before, config = (json.loads(definition(lr).config_json) for lr in (1e-4, 5e-4))
    write_json(run.config, before)

    @asynccontextmanager
    async def refused(*_: object, **__: object) -> AsyncIterator[None]:
        raise ConfigError("an actor is alive and would go on by other settings")
        yield

    monkeypatch.setattr(local, "_parts", refused)
    with pytest.raises(ConfigError):
        await local._supervise(resolve(config), run, console, asyncio.Event(), own_bus=own_bus, lock=0)
    asked, told = (json.loads(path.read_text()) for path in (run.asked_config, run.config))
    assert asked["learner"] == config["learner"]
    assert told["learner"] == (config if own_bus else before)["learner"]


async def test_a_stop_ends_the_wait_and_a_bus_of_its_own_keeps_no_definition(bus: Bus):
    stop = asyncio.Event()
    assert await local._announced_anew([bus], stop, own_bus=False) is None
    await bus.put("run", definition(1e-4))
    announced = await local._announced_anew([bus], stop, own_bus=False)
    assert announced is not None
    assert not await announced()
    stop.set()
    assert await announced()
    assert await local._announced_anew([bus], stop, own_bus=True) is None
    assert await bus.get("run", RunRecord) is None
