"""Environment variables name the run and its bus, over files and under flags."""

import os
from pathlib import Path

import pytest

from bus.config import URL_VARIABLE
from launch.cli import main as cli
from launch.cli.app import run_and_own_settings
from launch.local.local import _run_parts
from launch.settings.environment_variables import (
    DASHBOARD_TOKEN_VARIABLE,
    LOG_VARIABLES,
    SETTING_VARIABLES,
    without_setting_variables,
)
from launch.settings.run_config import RunConfig, resolve, validate
from storage.disk.run_directory import RunDirectory


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch):
    for name in SETTING_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch):
    """Run the command line up to the work; returns the configuration that the work gets."""
    work: list = []

    def called(*arguments: str) -> RunConfig:
        for commands in cli.COMMANDS:
            monkeypatch.setattr(commands, "run", work.append, raising=False)
            monkeypatch.setattr(commands, "configure_logging", lambda *_: None, raising=False)
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert not ended.value.code
        return next(one for one in work[-1].args if isinstance(one, RunConfig))

    return called


def test_variables_go_over_files_and_flags_over_variables(called, tmp_path: Path, monkeypatch):
    (tmp_path / "run.toml").write_text('run = "of_file"\n[bus]\nurl = "nats://file:1"\n')
    monkeypatch.setenv("SLUICE_RUN", "of_variable")
    monkeypatch.setenv("SLUICE_DIRECTORY", "elsewhere")
    monkeypatch.setenv("SLUICE_BUS", "nats://variable:1")
    file = ("storage", "--config", str(tmp_path / "run.toml"), "--data.task", "sort")
    found = called(*file)
    assert (found.run, found.directory, found.bus.url) == (
        "of_variable", Path("elsewhere"), "nats://variable:1",
    )  # fmt: skip
    found = called(*file, "--run", "of_flag", "--bus", "nats://flag:1", "--directory", "here")
    assert (found.run, found.directory, found.bus.url) == ("of_flag", Path("here"), "nats://flag:1")


@pytest.mark.first(2, others=pytest.mark.slow)
@pytest.mark.parametrize("command", ["learner", "actors", "gateway", "shards --shards 0", "watch"])
def test_every_command_that_joins_a_run_finds_its_bus_by_the_variables(
    command: str, called, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "mine").mkdir()
    recorded = validate({"run": "mine", "bus": {"url": "nats://127.0.0.1:4567"}})
    (tmp_path / "mine/config.json").write_text(recorded.model_dump_json())
    monkeypatch.setenv("SLUICE_RUN", "mine")
    monkeypatch.setenv("SLUICE_DIRECTORY", str(tmp_path))
    found = called(*command.split())
    assert (found.run, found.directory, found.bus.url) == ("mine", tmp_path, "nats://127.0.0.1:4567")
    monkeypatch.setenv("SLUICE_BUS", "nats://other:1")
    assert called(*command.split()).bus.url == "nats://other:1"


def test_a_learner_and_its_shadow_find_the_bus_in_the_directory_that_a_flag_names(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    recorded = validate({"run": "mine", "bus": {"url": "nats://127.0.0.1:4567"}})
    (tmp_path / "mine/config.json").write_text(recorded.model_dump_json())
    given = {"run": "mine", "directory": str(tmp_path), "learner": {"steps": "3"}}
    where, own = run_and_own_settings({}, given)
    assert where.bus.url == "nats://127.0.0.1:4567"
    assert own == {"learner": {"steps": "3"}}


def test_an_empty_variable_is_none(called, monkeypatch: pytest.MonkeyPatch):
    for name in (*SETTING_VARIABLES, DASHBOARD_TOKEN_VARIABLE):
        monkeypatch.setenv(name, "")
    found = called("actors")
    assert (found.run, found.directory) == ("default", Path("runs"))
    assert found.bus == RunConfig().bus
    assert DASHBOARD_TOKEN_VARIABLE not in os.environ


def test_the_help_names_every_variable_that_users_set():
    for name in (*SETTING_VARIABLES, *LOG_VARIABLES, DASHBOARD_TOKEN_VARIABLE):
        assert name in cli.FURTHER_HELP


def test_the_parts_of_a_run_are_of_that_run_whatever_the_environment_says(
    called, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """They inherit the variables of `launch local`."""
    config = resolve({"run": "mine", "directory": tmp_path, "data": {"task": "sort"}})
    run = RunDirectory(tmp_path, "mine")
    run.asked_config.write_text(config.model_dump_json())
    monkeypatch.setenv("SLUICE_RUN", "other")
    monkeypatch.setenv("SLUICE_DIRECTORY", "elsewhere")
    for part in _run_parts(config, run):
        for name, value in part.environment.items():
            monkeypatch.setenv(name, value)
        found = called(*part.command[part.command.index("launch") + 1 :])
        assert (part.name, found.run, found.directory) == (part.name, "mine", tmp_path)


def test_a_run_is_removed_only_by_a_name_in_the_command_line(monkeypatch, capsys: pytest.CaptureFixture):
    monkeypatch.setenv("SLUICE_RUN", "mine")
    with pytest.raises(SystemExit, match="2"):
        cli.main(["runs", "remove", "--yes"])
    assert "--run" in capsys.readouterr().err


def test_a_command_for_another_run_is_started_without_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLUICE_RUN", "mine")
    monkeypatch.setenv(URL_VARIABLE, "nats://there:1")
    assert {*os.environ} - {*without_setting_variables()} == {"SLUICE_RUN", URL_VARIABLE}


@pytest.mark.parametrize("command", ["status", "local", "actors"])
def test_help_names_the_variables(command: str, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert "SLUICE_RUN" in capsys.readouterr().out
