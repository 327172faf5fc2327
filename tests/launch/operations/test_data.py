"""`launch data` against a storage process: checked as at the start, in force from the next lease on."""

import asyncio
import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from bus.codec import encode
from bus.config import BusConfig
from bus.connection import bus as connection
from bus.connection import roles
from bus.errors import BusAwayError, ConfigError
from bus.server.nats_server import NatsServer
from bus.streams.blob_store import put_blob
from bus.streams.publish import Publisher
from launch.operations import live_run
from launch.operations.live_run import add_data
from launch.settings.run_config import RunConfig
from storage.disk.run_directory import RunDirectory
from storage.service import StorageSettings, run_storage
from tests.storage.conftest import quick  # noqa: F401 - a fixture
from tests.storage.served_storage import files_of_a_model, publish_policy
from tests.storage.serving import SMALL, has, leases, running, send_rejections

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]


def prompts(path: Path, *contents: str) -> Path:
    path.write_text("".join(json.dumps({"prompt": content}) + "\n" for content in contents))
    return path


@pytest.fixture
def where(bus_server: NatsServer, tmp_path: Path) -> RunConfig:
    return RunConfig(run="test", directory=tmp_path / "runs", bus=BusConfig(url=bus_server.url))


@pytest.fixture
def settings(where: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StorageSettings:
    monkeypatch.setattr(roles, "RENEW_S", 0.1)
    return StorageSettings(
        data=where.data.model_copy(
            update={"prompts": prompts(tmp_path / "old.jsonl", "a", "b"), "shuffle": False}
        ),
        admission=SMALL,
        replay=where.replay,
        seed=0,
        max_new_tokens=10,
        run=RunDirectory(where.directory, "test"),
        config_json=where.model_dump_json(),
    )


async def issued(bus) -> list[str]:
    return [str(lease.prompt.content) for lease in await leases(bus)]


async def test_other_prompts_take_over_with_the_next_lease_and_stay_after_a_restart(
    bus, where, settings, tmp_path
):  # fmt: skip
    added, stop = prompts(tmp_path / "new.jsonl", "c", "d", "e"), asyncio.Event()
    async with running(lambda stop: run_storage(bus, settings, stop)):
        with pytest.raises(ConfigError, match="run 'test' goes on with its prompts: the learner has not"):
            await add_data(where, added, False, stop)
        await publish_policy(
            bus, await put_blob(bus, Publisher(bus), encode(files_of_a_model(tmp_path / "model")), "model")
        )
        await has(bus, "TASKS", 4)
        accepted = await add_data(where, added, False, stop)
        assert (accepted.first_lease, accepted.prompts) == (4, 3)
        long = prompts(tmp_path / "long.jsonl", "f", "x" * 30)
        with pytest.raises(ConfigError, match=r"prompt 2 has 32 tokens: with 10 new ones it exceeds"):
            await add_data(where, long, True, stop)
        bad = prompts(tmp_path / "bad.jsonl", "f", "")
        with pytest.raises(ConfigError, match=r"bad\.jsonl, line 2: 'prompt' is empty"):
            await add_data(where, bad, True, stop)
        await send_rejections(bus, [0, 1])
        await has(bus, "TASKS", 6)
    async with running(lambda stop: run_storage(bus, settings, stop)):
        await send_rejections(bus, [2, 3])
        await has(bus, "TASKS", 8)
        accepted = await add_data(where, added, True, stop)
        assert (accepted.first_lease, accepted.prompts) == (8, 6)
        await send_rejections(bus, [4])
        await has(bus, "TASKS", 9)
    assert await issued(bus) == ["a", "b", "a", "b", "c", "d", "e", "c", "c"]


async def test_a_run_that_nobody_serves_is_named(bus, where, tmp_path):
    impatient = where.model_copy(update={"bus": where.bus.model_copy(update={"join_timeout_s": 0.1})})
    with pytest.raises(BusAwayError, match="is `launch storage --run test` running on this bus"):
        await add_data(impatient, prompts(tmp_path / "new.jsonl", "c"), False, asyncio.Event())


async def test_a_run_that_is_not_there_is_not_waited_for_in_silence(where, tmp_path, monkeypatch):
    assert where.bus.join_timeout_s > 10
    monkeypatch.setattr(live_run, "RUN_TIMEOUT_S", 0.6)
    monkeypatch.setattr(connection, "SAY_AFTER_S", 0.1)
    other = where.model_copy(update={"run": "other"})
    with capture_logs() as logs:
        async with asyncio.timeout(60):
            with pytest.raises(BusAwayError, match=r"run 'other': .*is `launch storage --run other` running"):
                await add_data(other, prompts(tmp_path / "new.jsonl", "c"), False, asyncio.Event())
    [said] = [entry for entry in logs if entry["event"] == "waiting_for_key"]
    assert (said["run"], said["key"]) == ("other", "run")
    assert "is `launch storage --run other` running" in said["hint"]
