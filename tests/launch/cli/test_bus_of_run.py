"""Commands for a run that goes on find its bus in its directory, unless they are told of another."""

import fcntl
import json
from pathlib import Path

import pytest

from bus.errors import ConfigError
from bus.server.secure_directory import SecureDirectory
from launch.cli.app import READERS, LiveRun, with_bus_of_run
from launch.cli.watch_commands import located
from launch.settings.run_config import RunConfig, validate
from launch.settings.short_forms import short_forms


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch):
    for name in ("SLUICE_BUS", "SLUICE_CREDS"):
        monkeypatch.delenv(name, raising=False)


def written(directory: Path, url: str) -> dict[str, object]:
    """Write the settings of a run as `launch local` does; return the flags that name it."""
    (directory / "mine").mkdir()
    config = validate({"run": "mine", "bus": {"url": url}})
    (directory / "mine/config.json").write_text(config.model_dump_json())
    return {"run": "mine", "directory": directory}


def test_bus_is_the_one_in_the_runs_config(tmp_path: Path):
    named = written(tmp_path, "nats://127.0.0.1:4567")
    assert validate(with_bus_of_run(named)).bus.url == "nats://127.0.0.1:4567"


def test_a_bus_that_is_named_counts_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    named = written(tmp_path, "nats://127.0.0.1:4567")
    flag = {**named, **short_forms("nats://a:1")}
    assert validate(with_bus_of_run(flag)).bus.url == "nats://a:1"
    monkeypatch.setenv("SLUICE_BUS", "nats://b:1")
    assert validate(with_bus_of_run({**named, **short_forms()})).bus.url == "nats://b:1"


def test_a_run_that_has_ended_with_its_bus_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    written(tmp_path, "nats://127.0.0.1:4567")
    live = LiveRun(run_name="mine", directory=tmp_path)
    assert live.live_config().bus.url == "nats://127.0.0.1:4567"  # the bus is not the run's own
    (tmp_path / "mine/bus").mkdir()
    with pytest.raises(ConfigError, match=r"(?s)'mine'.*does not go on.*launch runs show --run mine"):
        live.live_config()
    with (tmp_path / "mine/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert live.live_config().bus.url == "nats://127.0.0.1:4567"
    monkeypatch.setenv("SLUICE_BUS", "nats://b:1")
    assert live.live_config().bus.url == "nats://b:1"


def test_credentials_of_a_role_that_may_not_hear_are_refused_with_those_that_may(tmp_path: Path):
    secure = SecureDirectory(tmp_path / "keys")
    secure.make(["mine"], "nats://127.0.0.1:4222")
    files = secure.files("mine")

    def live(role: str) -> LiveRun:
        return LiveRun(run_name="mine", directory=tmp_path, creds=files.creds(role))

    assert live("storage").live_config(*READERS).bus.creds == files.creds("storage")
    with pytest.raises(ConfigError, match=r"actor.creds .*'actor'.*those of watcher or operator or storage"):
        live("actor").live_config(*READERS)
    with pytest.raises(ConfigError, match="role 'judge'"):
        located("mine", directory=tmp_path, given=short_forms(None, files.creds("judge")), named="mine")


def test_the_dashboard_asks_each_run_on_its_own_bus(tmp_path: Path):
    written(tmp_path, "nats://own:1")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/config.json").write_text('{"run": "plain"}')
    given = short_forms("nats://given:1")

    def url(name: str, named: str | None) -> str | None:
        return located(name, directory=tmp_path, given=given, named=named).bus.url

    assert url("mine", None) == "nats://own:1"
    assert url("mine", "mine") == "nats://given:1"
    assert url("mine", "other") == "nats://own:1"
    assert url("plain", None) == url("absent", None) == "nats://given:1"
    assert url("plain", "mine") == url("absent", "mine") == RunConfig().bus.url


def test_the_dashboard_says_how_to_give_a_password(tmp_path: Path):
    written(tmp_path, "nats://user:secret@host:4222")
    given = short_forms("nats://user:secret@host:4222")
    with pytest.raises(ConfigError, match="give its URL in SLUICE_BUS, and --run mine"):
        located("mine", directory=tmp_path, given=given, named=None)
    found = located("mine", directory=tmp_path, given=given, named="mine")
    assert found.bus.url == "nats://user:secret@host:4222"


def test_other_settings_of_the_bus_stay(tmp_path: Path):
    named = {**written(tmp_path, "nats://127.0.0.1:4567"), "bus": {"join_timeout_s": 5.0}}
    bus = validate(with_bus_of_run(named)).bus
    assert (bus.url, bus.join_timeout_s) == ("nats://127.0.0.1:4567", 5.0)


def test_without_the_file_the_default_stays(tmp_path: Path):
    bus = validate(with_bus_of_run({"run": "other", "directory": tmp_path})).bus
    assert bus.url == "nats://127.0.0.1:4222"


def test_password_that_no_file_holds_is_asked_for(tmp_path: Path):
    named = written(tmp_path, "nats://user:secret@host:4222")
    assert "secret" not in json.dumps((tmp_path / "mine/config.json").read_text())
    with pytest.raises(ConfigError, match="no file holds: give its URL in SLUICE_BUS"):
        with_bus_of_run(named)
