"""The frame of every process: its signals, and what becomes of it when its terminal is closed."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.process.runtime import KILLED, run
from tests.e2e.commands import ENVIRONMENT, wait_until

DRAINS = """
import asyncio, sys
from pathlib import Path
from launch.process.runtime import run

async def main(stop):
    print("ready", flush=True)
    Path(sys.argv[1], "ready").touch()
    await stop.wait()
    print("stopping", flush=True)
    Path(sys.argv[1], "drained").touch()

run(main)
"""
"""A process that prints after it was told to stop, and then shows that it ended as it wanted to."""


ENDS = """
import asyncio, os, signal, sys
from launch.process.runtime import run

async def main(stop):
    stop.set()
    heard = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, heard.set)
    for number in [signal.SIGTERM] * int(sys.argv[1]) + [signal.SIGUSR1]:
        os.kill(os.getpid(), number)
    await heard.wait()

run(main)
"""
"""A process that stops by itself, and gets so many signals meanwhile."""


@pytest.fixture(autouse=True)
def nothing_is_ignored() -> Iterator[None]:
    """What this process ignores, as under nohup or in the background of a script, its children ignore too."""
    handlers = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_closed_terminal_stops_a_process_as_sigterm_does(tmp_path: Path):
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-c", DRAINS, str(tmp_path)], ENVIRONMENT)
    ended: list[int] = []

    def reaped() -> bool:
        found, status = os.waitpid(pid, os.WNOHANG)
        ended.extend([os.waitstatus_to_exitcode(status)] if found else [])
        return bool(found)

    try:
        wait_until((tmp_path / "ready").exists, "the process in the terminal")
        os.close(terminal)
        wait_until(reaped, "its end")
    finally:
        if not ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert ended == [0]
    assert (tmp_path / "drained").exists()


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_a_process_in_its_own_time(tmp_path: Path, number: signal.Signals):
    command = [sys.executable, "-c", DRAINS, str(tmp_path)]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        wait_until((tmp_path / "ready").exists, "the process")
        process.send_signal(number)
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert said.splitlines() == ["ready", "stopping"]


@pytest.mark.parametrize(("signals", "status"), [(1, 0), (2, KILLED)])
def test_a_process_that_ends_by_itself_is_cut_off_by_a_second_signal_alone(signals: int, status: int):
    command = [sys.executable, "-c", ENDS, str(signals)]
    assert subprocess.run(command, env=ENVIRONMENT, check=False).returncode == status


def test_an_ignored_hangup_stays_ignored(tmp_path: Path):
    command = ["nohup", sys.executable, "-c", DRAINS, str(tmp_path)]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL) as process:
        wait_until((tmp_path / "ready").exists, "the process")
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)  # a second signal would end it with another status
        assert process.wait(120) == 0
    assert (tmp_path / "drained").exists()


def test_ctrl_c_while_the_command_line_loads_is_no_traceback(tmp_path: Path):
    slow = tmp_path / "cyclopts.py"  # which the command line loads first
    slow.write_text(f"open({str(tmp_path / 'loading')!r}, 'w'); import time; time.sleep(60)")
    command = [sys.executable, "-m", "launch", "--help"]
    environment = ENVIRONMENT | {"PYTHONPATH": f"{tmp_path}:{ENVIRONMENT['PYTHONPATH']}"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        wait_until((tmp_path / "loading").exists, "the first modules")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert (process.returncode, said) == (130, "")


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize(
    ("work", "status", "message"),
    [
        (
            "append_lines(Path('/dev/full'), [{'step': 1}])",
            75,
            "the disk is full, and /dev/full could not be",
        ),
        (
            "append_lines(Path('/tmp'), [{}])",
            2,
            "/tmp is a directory, and a file belongs there: move it away",
        ),
        pytest.param(
            "Path('/dev/null/x').open('w')", 2, "/dev/null/x lies below a file", marks=pytest.mark.nightly
        ),
        ("Path('/nowhere/x').read_text()", 1, "FileNotFoundError"),
    ],
)
def test_what_a_disk_refuses_ends_a_process_in_a_line_and_a_bug_in_a_traceback(
    work: str, status: int, message: str
):
    program = f"""
from pathlib import Path
from launch.process.runtime import run
from storage.disk.atomic_files import append_lines
import asyncio

async def main(stop):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.to_thread(lambda: {work}))

run(main)
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == status
    assert message in ended.stderr
    assert ("Traceback" in ended.stderr) == (status == 1)


def test_a_rank_ends_although_its_thread_waits_for_one_that_is_gone():
    program = """
import threading
from bus.errors import WorldError
from launch.process.runtime import run

async def main(stop):
    threading.Thread(target=threading.Event().wait).start()
    raise WorldError("rank 0 of the learner lost rank 1, silent for 120 s")

run(main)
"""
    command, rank = [sys.executable, "-c", program], ENVIRONMENT | {"LOCAL_RANK": "0"}
    ended = subprocess.run(command, env=rank, capture_output=True, text=True, timeout=200, check=False)
    assert (ended.returncode, ended.stderr) == (
        1,
        "launch: rank 0 of the learner lost rank 1, silent for 120 s\n",
    )


def test_the_end_of_a_process_does_not_search_its_libraries_for_garbage():
    program = (
        "import atexit, gc, sys; atexit.register(lambda: print('frozen:', gc.get_freeze_count() > 0)); "
        "sys.argv[1:] = ['--version']; from launch.__main__ import main; main()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert (ended.returncode, ended.stdout.split()[1:]) == (0, ["frozen:", "True"]), ended.stderr


@pytest.mark.slow
def test_a_command_whose_reader_has_left_ends_without_a_word():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "launch", "local", "--preset", "sort", "--print-config"]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=200)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


def test_a_broken_pipe_of_something_else_than_the_output_is_a_bug():
    async def breaks(stop):
        raise ExceptionGroup("tasks", [BrokenPipeError(32, "Broken pipe")])

    with pytest.raises(BrokenPipeError):
        run(breaks)
