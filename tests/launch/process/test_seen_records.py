"""A process that starts again acts on no signed record that is older than those it had taken."""

import asyncio
import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from bus.config import BusConfig
from bus.connection import key_bucket
from bus.messages import RunRecord
from bus.security.credentials import load_credentials
from bus.server.nats_server import NatsServer
from launch.process.run_connection import connected
from launch.settings.run_config import RunConfig
from tests.bus.security.secured import by_role, make_streams, secured_bus
from tests.storage.serving import until

pytestmark = pytest.mark.nats


async def test_a_record_that_was_put_back_meanwhile_is_not_acted_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(key_bucket, "LOOK_S", 0.05)
    old, new = (RunRecord(name="mine", config_json=json.dumps({"seed": seed})) for seed in (1, 2))
    seen = tmp_path / "runs/mine/seen-actors.json"
    async with secured_bus(tmp_path, "mine") as (secure, _):
        as_role = by_role(secure)
        await make_streams(as_role)
        creds = secure.path / "mine/actor.creds"

        def where(directory: str) -> RunConfig:
            bus = BusConfig(url=load_credentials(creds).url, creds=creds)
            return RunConfig(run="mine", directory=tmp_path / directory, bus=bus)

        async with as_role("storage") as storage, as_role("operator") as enemy:
            await storage.put("run", old)
            earlier = (await enemy.js.get_last_msg("KV_sluice-mine", "$KV.sluice-mine.run")).data
            await storage.put("run", new)
            seen.parent.mkdir(parents=True)
            async with connected(where("runs"), "actors", asyncio.Event()) as actor:
                assert await actor.holds("run", new)
                await until(lambda: seen.exists() and "run" in seen.read_text())  # before its end
            await enemy.js.publish("$KV.sluice-mine.run", earlier)
            async with connected(where("runs"), "actors", asyncio.Event()) as actor:
                assert await actor.get("run", RunRecord) is None
            async with connected(where("elsewhere"), "actors", asyncio.Event()) as actor:
                assert await actor.holds("run", old)  # it has seen none, and cannot know
            await storage.put("run", new)
            async with connected(where("runs"), "actors", asyncio.Event()) as actor:
                assert await actor.holds("run", new)


@pytest.mark.parametrize("user", ["", "me:secret@"])
async def test_a_process_says_that_nobody_signs_on_a_bus_with_a_password(bus_server: NatsServer, user: str):
    url = bus_server.url.replace("//", f"//{user}")
    with capture_logs() as said:
        async with connected(RunConfig(bus=BusConfig(url=url)), "actors", asyncio.Event()):
            pass
    found = [line["reason"] for line in said if line["event"] == "records_not_signed"]
    assert len(found) == bool(user)
    assert all(one.startswith("Records are not signed on a bus with a password") for one in found)
