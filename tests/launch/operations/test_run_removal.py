"""`launch runs remove`: what a run holds on a real bus and on the disk is shown, then freed."""

import asyncio
from pathlib import Path

import pytest

from bus.connection import roles
from bus.connection.bus import Bus
from bus.connection.roles import hold_role
from bus.errors import ConfigError
from bus.server.nats_server import NatsServer
from bus.topology import stored_bytes
from launch.cli import run_commands
from launch.cli.main import main
from launch.operations import run_removal
from launch.operations.run_removal import remove_run
from launch.settings.run_config import RunConfig, resolve
from storage.disk.atomic_files import try_lock, write_json
from storage.disk.run_directory import RunDirectory

pytestmark = pytest.mark.nats
STOP = asyncio.Event()


@pytest.fixture
def where(bus: Bus, bus_server: NatsServer, tmp_path: Path) -> RunConfig:
    """Run "test", with streams on a bus and a file of 1,000 bytes in its directory."""
    (tmp_path / "runs/test/logs").mkdir(parents=True)
    (tmp_path / "runs/test/logs/actors.log").write_bytes(bytes(1000))
    return resolve({"run": "test", "directory": tmp_path / "runs", "bus": {"url": bus_server.url}})


async def test_nothing_is_removed_unless_confirmed(bus: Bus, where: RunConfig):
    await bus.js.publish(bus.subject("events", "metrics"), bytes(5000))
    found = await remove_run(where, on_bus=True, confirmed=False, stop=STOP)
    others = ("TASKS", "TRAJECTORIES-1", "OUTCOMES", "WEIGHTS", "FILES", "EVENTS", "DEAD")
    names = {f"test-{name}" for name in ("TRAJECTORIES", *others)}
    assert found.streams.keys() == (await stored_bytes(bus.js, bus.topology)).keys()
    assert found.streams.keys() == names | {"KV_sluice-test"}
    assert found.streams["test-EVENTS"] > 5000
    assert (found.directory, found.directory_bytes) == (where.directory / "test", 1000)
    assert found.directory.exists()


async def test_a_confirmed_removal_frees_both_and_no_other_run(
    bus: Bus, where: RunConfig, server: NatsServer
):
    (where.directory / "other").mkdir()
    async with Bus.connect(where.bus, "other", name="other") as other:
        await other.create_keys()
        await remove_run(where, on_bus=True, confirmed=True, stop=STOP)
        assert list(await stored_bytes(other.js, other.topology)) == ["KV_sluice-other"]
    assert await stored_bytes(bus.js, bus.topology) == {}
    assert [path.name for path in where.directory.iterdir()] == ["other"]
    with pytest.raises(ConfigError, match=r"there is no run 'test' in .* or on this bus"):
        await remove_run(where, on_bus=True, confirmed=True, stop=STOP)


async def test_a_run_goes_with_the_runs_of_its_further_policies_and_one_of_another_host_stays(
    where: RunConfig,
):
    runs = (
        ("test__critic", "critic", "ended"),
        ("test__own", "default", "ended"),
        ("theirs", "default", "lost"),
    )
    for name, trains, ending in runs:
        run = RunDirectory(where.directory, name)
        write_json(run.config, {"trains": trains})
        run.write_provenance()
        write_json(run.ending, {"state": ending, "host": "elsewhere" if ending == "lost" else ""})
    await remove_run(where, on_bus=False, confirmed=True, stop=STOP)
    assert sorted(path.name for path in where.directory.iterdir()) == ["test__own", "theirs"]
    theirs = where.model_copy(update={"run": "theirs"})
    with pytest.raises(ConfigError, match="is of another user or host, where it may go on"):
        await remove_run(theirs, on_bus=False, confirmed=True, stop=STOP)


async def test_without_a_bus_only_the_directory_goes(bus: Bus, where: RunConfig):
    await remove_run(where, on_bus=False, confirmed=True, stop=STOP)
    assert not (where.directory / "test").exists()
    assert "test-TASKS" in await stored_bytes(bus.js, bus.topology)


@pytest.mark.parametrize("role", ["dispatcher", "learner"])
async def test_a_run_that_goes_on_is_not_removed_nor_one_whose_process_fell_silent_lately(
    bus: Bus, where: RunConfig, role: str, monkeypatch: pytest.MonkeyPatch
):
    async with hold_role(bus, role, "alive") as renewing:
        for _ in ("alive", "suspended"):
            with pytest.raises(
                ConfigError, match=rf"already has a {role}: process \d+ on .* heard last at [\d:]{{8}} \("
            ):
                await remove_run(where, on_bus=True, confirmed=True, stop=STOP)
            renewing.cancel()
        assert (where.directory / "test").exists()
        monkeypatch.setattr(roles, "EXPIRE_S", 0.1)
        monkeypatch.setattr(run_removal, "GONE_S", 0.0)
        await remove_run(where, on_bus=True, confirmed=False, stop=STOP)


@pytest.mark.parametrize("lock", ["lock", "storage.lock", "replay/shard_00/.lock"])
async def test_a_directory_in_use_is_not_removed(where: RunConfig, lock: str):
    path = where.directory / "test" / lock
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as held:
        assert try_lock(held)
        with pytest.raises(ConfigError, match="is held by a running process: stop the run first"):
            await remove_run(where, on_bus=False, confirmed=True, stop=STOP)
    assert path.exists()


def test_the_command_says_what_it_would_remove(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        run_commands, "configure_logging", lambda level: None
    )  # which is for all of a process
    (tmp_path / "runs/old").mkdir(parents=True)
    (tmp_path / "runs/old/weights").write_bytes(bytes(2_500_000))
    command = ["runs", "remove", "--run", "old", "--directory", str(tmp_path / "runs")]
    for confirmed, last in ((), "nothing was removed: give --yes to remove it"), (("--yes",), "removed"):
        with pytest.raises(SystemExit) as ended:
            main([*command, *confirmed])
        assert ended.value.code == 0
        assert capsys.readouterr().out.splitlines() == [f"{tmp_path}/runs/old: 2.5 MB", last]
    assert not (tmp_path / "runs/old").exists()


@pytest.mark.parametrize("flags", [("--bus", "nats://b:1"), ("--creds", "operator.creds"), ()])
def test_the_command_takes_the_bus_from_credentials_too(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    looked = []
    monkeypatch.setattr(run_commands, "configure_logging", lambda level: None)
    monkeypatch.setattr("launch.operations.run_removal.remove_run", lambda *given: looked.append(given[1]))
    monkeypatch.setattr(run_commands, "run", lambda work: work())
    monkeypatch.setattr(
        run_commands, "short_forms",
        lambda bus, creds: {"bus": {"url": bus or "nats://c:1"}} if bus or creds else {},
    )  # fmt: skip
    with pytest.raises(SystemExit):
        main(["runs", "remove", "--run", "old", "--directory", str(tmp_path), *flags])
    assert looked == [bool(flags)]
