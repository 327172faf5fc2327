"""Killing a run ends every process of it, whatever ends meanwhile."""

import asyncio
import signal
import time
from contextlib import suppress

import psutil
import pytest

from bus.errors import SluiceError
from bus.process.child_process import module_command
from soak.local_run import LocalRun, launch_command
from storage.disk.run_directory import RunDirectory

TIMEOUT_S = 60


@pytest.fixture
async def start_run(tmp_path):
    """Starts one whose supervisor is a shell command; kills what is left of it."""
    started = []

    async def start(command):
        local = LocalRun(RunDirectory(tmp_path, "faulty"), ())
        local.process = await asyncio.create_subprocess_exec("sh", "-c", command, start_new_session=True)
        started.append(local.process)
        return local

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def running(word):
    """Processes with a word in their command."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = " ".join(process.info["cmdline"] or ())
        if word in command and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


async def until(condition):
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - processes tell nobody
            await asyncio.sleep(0.05)


async def test_an_orphan_begins_nothing_while_it_is_killed(start_run, tmp_path):
    word = f"86399.{time.time_ns()}"
    script = tmp_path / "part.sh"
    script.write_text(f"while :; do sleep {word}; done\n")
    local = await start_run(f"sh {script} & sh {script} & wait")
    await until(lambda: len(running(word)) == 2)
    try:
        await local.kill(patience_s=0)
        await until(lambda: not running(word) and not running(str(script)))
    finally:
        for process in [*running(str(script)), *running(word)]:
            process.kill()
    assert local.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("where", ["suspend", "children"])
async def test_a_supervisor_that_ends_meanwhile_is_no_error(start_run, monkeypatch, where):
    def gone(process, **_):
        raise psutil.NoSuchProcess(process.pid)

    local = await start_run("exec sleep 86399")
    monkeypatch.setattr(psutil.Process, where, gone)
    async with asyncio.timeout(TIMEOUT_S):
        await local.kill(patience_s=0)
    assert local.process.returncode == -signal.SIGKILL


async def test_what_cannot_be_looked_for_does_not_keep_the_supervisor_running(start_run, monkeypatch):
    def refused(process, **_):
        raise psutil.AccessDenied(process.pid)

    local = await start_run("exec sleep 86399")
    monkeypatch.setattr(psutil.Process, "children", refused)
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(psutil.AccessDenied):
            await local.kill(patience_s=0)
        assert await local.process.wait() == -signal.SIGKILL


def test_a_part_is_found_by_the_command_that_starts_it():
    assert launch_command(module_command("launch", "storage", "--run", "bus")) == "storage"
    assert launch_command(module_command("benchmarks.bus", "storage")) == ""
    assert launch_command(("nats-server", "--config", "bus.conf")) == ""
    assert launch_command(()) == ""


async def test_a_run_that_was_killed_on_purpose_has_not_given_up(start_run):
    local = await start_run("exec sleep 86399")
    await local.kill(patience_s=0)
    local.raise_if_ended()


async def test_a_run_that_ended_by_itself_has_given_up(start_run):
    local = await start_run("exit 2")
    await local.process.wait()
    with pytest.raises(SluiceError, match="gave up with status 2"):
        local.raise_if_ended()


async def test_a_run_that_found_no_bus_is_started_again_and_any_other_end_is_an_error(start_run):
    local = await start_run("exit 75")
    await local.process.wait()
    first = local.process
    try:
        assert await local.go_on()
        assert local.process is not first
    finally:
        await local.kill(patience_s=0)
    local = await start_run("exit 1")
    await local.process.wait()
    with pytest.raises(SluiceError, match="gave up with status 1"):
        await local.go_on()
