"""A storage that is killed and starts again tells of no alarm twice, and of each one that begins."""

import asyncio
import json
from pathlib import Path

import pytest

from bus.connection.bus import Bus
from bus.server.nats_server import NatsServer
from tests.e2e.commands import SMALL, Command
from tests.launch.messages import learner
from tests.storage.serving import until

pytestmark = [pytest.mark.nightly, pytest.mark.nats, pytest.mark.timeout(600)]


async def test_a_killed_storage_tells_of_each_alarm_once(tmp_path: Path, server: NatsServer, bus: Bus):
    settings = (
        "--bus", server.url, "--run", bus.topology.run, *SMALL,
        "--monitoring.alert-command", "sh -c 'cat >> told'",
    )  # fmt: skip
    alarms = {"each reward was 0": "each reward was 0 in 3 steps in a row"}
    said = learner(step=20, alarms=alarms)

    def told() -> list[str]:
        file = tmp_path / "told"
        return [json.loads(line)["reason"] for line in file.read_text().splitlines()] if file.exists() else []

    async def tell(stop: asyncio.Event) -> None:
        while not stop.is_set():
            await bus.notify(bus.subject("status", "learner"), said)
            await asyncio.sleep(0.1)

    kept, stop = tmp_path / f"runs/{bus.topology.run}/alarms.json", asyncio.Event()
    telling = asyncio.create_task(tell(stop))
    storage = Command(tmp_path, "storage", *settings)
    try:
        await until(kept.exists, seconds=200)
        assert told() == [*alarms.values()]
        storage.kill()
        storage = Command(tmp_path, "storage", *settings)
        said = learner(step=21, alarms=alarms)
        await until(lambda: json.loads(kept.read_text()) == {"each reward was 0": 121}, seconds=200)
        said = learner(step=22, alarms=alarms | {"weights": "the engine has other weights"})
        await until(lambda: json.loads(kept.read_text()).get("weights") == 122, seconds=200)
        assert told() == [*alarms.values(), "the engine has other weights"]
    finally:
        stop.set()
        await telling
        storage.kill()
