"""A password in the bus's URL reaches the processes of a run, and nothing that others may read."""

from pathlib import Path

import pytest

from bus.config import URL_VARIABLE
from launch.local.local import _run_parts
from launch.settings.run_config import resolve
from launch.settings.short_forms import short_forms
from storage.disk.run_directory import RunDirectory

URL = "nats://me:hunter2@bus.example:4222"


def test_password_is_in_no_file_and_no_argument(tmp_path: Path):
    config = resolve({"bus": {"url": URL}, "data": {"task": "sort"}})
    assert "hunter2" not in config.model_dump_json()
    for part in _run_parts(config, RunDirectory(tmp_path, "run")):
        assert "hunter2" not in " ".join(part.command)
        assert part.environment[URL_VARIABLE] == URL


def test_process_takes_the_url_from_its_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(URL_VARIABLE, URL)
    assert short_forms()["bus"] == {"url": URL}
    assert short_forms("nats://other:1")["bus"] == {"url": "nats://other:1"}
