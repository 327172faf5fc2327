"""Logs as JSON: every line that a process writes to stderr is an object, whoever wrote it."""

import errno
import io
import json
import os
import subprocess
import sys

import pytest
import structlog

from launch.cli import options
from launch.cli.app import log_as
from launch.cli.main import main
from launch.process.log_settings import UnbrokenStream, configure_logging, logs_json
from launch.process.runtime import complaints, fail

PROGRAM = """
import logging, warnings
import structlog
from pathlib import Path
from launch.process.log_settings import configure_logging
configure_logging("info", "json", "learner")
log = structlog.get_logger()
log.debug("unseen")
log.info("weights_swapped", policy_version=7, where=Path("a"), text="two\\nlines")
logging.getLogger("library").warning("slow %s", "disk")
logging.getLogger("library").info("unseen")
logging.getLogger("asyncio").warning("returning true from eof_received() has no effect when using ssl")
warnings.warn("old")
key = "secret-" + "of-a-variable"
raise KeyError("nobody expected this")
"""


def test_every_line_is_an_object_with_who_wrote_it():
    ranked = os.environ | {"RANK": "3"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=ranked)
    assert done.returncode == 1
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["level"], line["event"].split("\n")[0][:20]) for line in lines[:2]] == [
        ("info", "weights_swapped"),
        ("warning", "slow disk"),
    ]
    assert (lines[0]["policy_version"], lines[0]["where"], lines[0]["text"]) == (7, "a", "two\nlines")
    assert "UserWarning: old" in lines[2]["event"]
    assert (lines[3]["event"], lines[3]["level"]) == ("process_crashed", "critical")
    assert lines[3]["exception"][0]["exc_type"] == "KeyError"
    assert "secret-of-a-variable" not in done.stderr
    for line in lines:
        assert (line["process"], line["rank"]) == ("learner", 3)
        assert line["timestamp"].endswith("Z")
    assert len({line["pid"] for line in lines}) == 1


def test_a_traceback_shows_no_values_of_variables(capfd: pytest.CaptureFixture):
    configure_logging()
    key = f"key-{os.getpid()}"
    try:
        int("broken")
    except ValueError:
        structlog.get_logger().exception("failed")
    said = capfd.readouterr().err
    assert "ValueError: invalid" in said
    assert key not in said


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_supervisor_reads_the_error_that_a_process_ends_with(form: str):
    code = f"""
from bus.errors import ConfigError
from launch.process.log_settings import configure_logging
from launch.process.runtime import run
configure_logging("error", {form!r}, "storage")
async def main(stop):
    raise ConfigError("no prompts:\\ngive --prompts")
run(main)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert done.stderr.startswith("{" if form == "json" else "launch: no prompts:\n")
    assert complaints(f"other output\n{done.stderr}") == ["no prompts:\ngive --prompts"]
    assert complaints('{"event": "process_fai') == []


def test_text_is_the_default():
    configure_logging()
    assert not logs_json()
    with pytest.raises(SystemExit, match="1"):
        fail(RuntimeError("x"))


def test_flags_reach_the_processes_that_are_started(monkeypatch: pytest.MonkeyPatch):
    for name in ("SLUICE_LOG_LEVEL", "SLUICE_LOG_FORMAT"):
        monkeypatch.delenv(name, raising=False)
    log_as(options.LogOptions(), "local", level="warning")
    assert "SLUICE_LOG_LEVEL" not in os.environ
    assert not structlog.get_logger().is_enabled_for(20)
    monkeypatch.setenv("SLUICE_LOG_LEVEL", "error")  # which monkeypatch removes in the end
    log_as(options.LogOptions(level="debug"), "local", level="warning")
    assert os.environ["SLUICE_LOG_LEVEL"] == "debug"
    assert structlog.get_logger().is_enabled_for(10)


@pytest.mark.parametrize(
    ("flags", "variables", "message"),
    [(("--log-level", "loud"), {}, "--log-level"), ((), {"SLUICE_LOG_FORMAT": "xml"}, "SLUICE_LOG_FORMAT")],
)
def test_a_level_or_format_that_is_none_is_refused(
    flags: tuple[str, ...], variables: dict, message: str, capsys: pytest.CaptureFixture, monkeypatch
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        main(["bus", *flags])
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.nats
def test_a_process_takes_the_format_from_the_environment(tmp_path):
    command = [sys.executable, "-m", "launch", "bus", "--port", "0", "--directory", str(tmp_path)]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"SLUICE_LOG_FORMAT": "json"}
    ) as process:
        assert process.stderr is not None
        line = json.loads(process.stderr.readline())
        process.terminate()
        rest = [json.loads(one) for one in process.stderr.read().splitlines()]
        assert process.wait(120) == 0
    assert (line["event"], line["process"], line["pid"]) == ("bus_ready", "bus", process.pid)
    assert all(one["process"] == "bus" for one in rest)


class Refusing(io.StringIO):
    """A file whose writes fail in one way."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def write(self, text: str) -> int:
        raise OSError(self._number, os.strerror(self._number))


def test_a_log_on_a_full_disk_ends_no_process():
    UnbrokenStream(Refusing(errno.ENOSPC)).write("a line\n")
    kept = io.StringIO()
    UnbrokenStream(kept).write("a line\n")
    assert kept.getvalue() == "a line\n"
    with pytest.raises(BrokenPipeError):  # any other failure is one
        UnbrokenStream(Refusing(errno.EPIPE)).write("a line\n")
