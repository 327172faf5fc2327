"""Supervision with small Python programs as parts."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from bus.errors import ConfigError, LostDataError, SluiceError
from launch.local import supervisor as supervising
from launch.local.supervisor import Part, Supervisor
from launch.process.runtime import KILLED, SUPERVISOR, complaints
from launch.settings.run_config import SupervisionConfig
from storage.disk import log_files

WAIT_S = 120.0
IMPATIENT = SupervisionConfig(restarts=2, window_s=60, first_pause_s=0.01)
SERVE = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("ready", flush=True)
time.sleep(600)
"""


def part(name: str, program: str, **options) -> Part:
    return Part(name, (sys.executable, "-c", textwrap.dedent(program)), **options)


async def until(condition) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - of other processes nobody sets an event
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.fixture
async def supervisor(tmp_path: Path):
    supervisor = Supervisor(tmp_path, policy=IMPATIENT)
    yield supervisor
    await supervisor.end()


async def failure_of(supervisor: Supervisor) -> Exception:
    """Return what `watch` raises, out of its group."""
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(WAIT_S):
            await supervisor.watch(asyncio.Event())
    [error] = caught.value.exceptions
    return error


async def test_a_part_that_was_killed_is_started_again(supervisor: Supervisor):
    serving = part("serving", SERVE)
    await supervisor.start(serving)
    stop = asyncio.Event()
    watching = asyncio.create_task(supervisor.watch(stop))
    [first] = supervisor.pids("serving")

    os.kill(first, signal.SIGKILL)
    await until(lambda: supervisor.pids("serving") not in ([], [first]))

    assert supervisor.restarts == 1
    stop.set()
    await watching


async def test_a_part_that_ended_on_a_full_disk_waits_for_room_and_that_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    looks, said = iter(["the disk is full", "the disk is full", ""]), []

    def lack_of_room(_: Path) -> str:
        said.append(supervisor.endings["writes"].text)
        return next(looks)

    monkeypatch.setattr(supervising, "lack_of_room", lack_of_room)
    monkeypatch.setattr(supervising, "ROOM_PERIOD_S", 0.01)
    supervisor = Supervisor(tmp_path, policy=IMPATIENT.model_copy(update={"restarts": 0}))
    once = f"""
        import pathlib, sys
        full = pathlib.Path("{tmp_path}/full")
        if not full.exists():
            full.touch()
            sys.exit("launch: cannot write a checkpoint:\\n        it has no room")
        """
    await supervisor.start(part("writes", once, ends_run=True))
    async with asyncio.timeout(WAIT_S):
        await supervisor.watch(asyncio.Event())
    assert supervisor.restarts == 1
    assert next(looks, "none left") == "none left"
    why = "ended: cannot write a checkpoint: it has no room; it starts again"
    assert said == [why, f"{why} once the disk has room", f"{why} once the disk has room"]
    assert supervisor.endings["writes"].text == "ended"


async def test_screens_are_told_how_a_part_ended_until_its_successor_is_heard(supervisor: Supervisor):
    await supervisor.start(part("serving", SERVE))
    stop = asyncio.Event()
    watching = asyncio.create_task(supervisor.watch(stop))
    [first] = supervisor.pids("serving")
    assert supervisor.endings == {}

    os.kill(first, signal.SIGKILL)
    await until(lambda: supervisor.restarts == 1)

    ending = supervisor.endings["serving"]
    assert (ending.pid, ending.text) == (first, "ended: signal SIGKILL; it was started again")
    stop.set()
    await watching


@pytest.mark.parametrize("failed", [0, 1])
async def test_a_part_that_may_end_does_not_end_the_run_and_is_started_again_if_it_fails_or_is_not_done(
    supervisor: Supervisor, tmp_path: Path, failed: int
):
    found = tmp_path / "there"
    once = f'import pathlib; found = pathlib.Path("{found}"); there = found.exists(); found.touch()'
    is_done = iter([True] if failed else [False, True])  # it is asked only about an end with status 0
    ending = f"{once}; raise SystemExit(0 if there else {failed})"
    await supervisor.start(part("ending", ending, may_end=lambda: next(is_done)))
    await supervisor.start(part("serving", SERVE))
    stop = asyncio.Event()
    watching = asyncio.create_task(supervisor.watch(stop))
    await until(
        lambda: len(supervisor.parts[0].started) == 2 and supervisor.endings["ending"].text == "ended"
    )

    assert supervisor.endings.keys() == {"ending"}
    assert not watching.done()
    stop.set()
    await watching
    assert supervisor.restarts == 1


async def test_each_restart_waits_longer_than_the_one_before(supervisor: Supervisor):
    await supervisor.start(part("failing", "raise SystemExit(1)"))
    await failure_of(supervisor)

    first, second, third = supervisor.parts[0].started
    assert second - first >= 0.01
    assert third - second >= 0.02


async def test_a_part_that_keeps_failing_ends_the_run_with_its_last_lines(supervisor: Supervisor):
    await supervisor.start(part("failing", 'print("the disk is on fire"); raise SystemExit(3)'))
    error = await failure_of(supervisor)

    assert type(error) is SluiceError
    assert "failing ended 3 times within 60 s, last with status 3" in str(error)
    assert "failing.log" in str(error)
    assert str(error).count("the disk is on fire") == 1  # of its last start alone


async def test_what_killed_a_part_is_named(supervisor: Supervisor):
    await supervisor.start(part("failing", "import os; os.kill(os.getpid(), 9)"))
    assert "signal SIGKILL" in str(await failure_of(supervisor))


@pytest.fixture
def small_cgroup():
    """A cgroup of 48 MiB; skips where this host does not let one be made."""
    group = Path(f"/sys/fs/cgroup/memory/sluice-test-{os.getpid()}")
    limit = "memory.limit_in_bytes"
    if not group.parent.is_dir():
        group, limit = Path("/sys/fs/cgroup", group.name), "memory.max"
    try:
        group.mkdir()
        (group / limit).write_text(str(48 << 20))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield group
    group.rmdir()


async def test_a_part_that_the_kernel_kills_for_memory_is_named_as_that(
    supervisor: Supervisor, small_cgroup: Path
):
    grows = f"open('{small_cgroup}/cgroup.procs', 'w').write('0'); bytearray(200 << 20)"
    await supervisor.start(part("growing", grows, smaller="set x=1"))
    error = str(await failure_of(supervisor))
    assert "last with signal SIGKILL, when the kernel killed" in error
    assert "for lack of memory: set x=1, or give it more" in error


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize("refusal", [ConfigError, LostDataError])
async def test_what_no_restart_mends_ends_the_run_at_once_with_the_parts_own_words(
    supervisor: Supervisor, tmp_path: Path, refusal: type[SluiceError]
):
    (tmp_path / "refusing.log").write_text("launch: of an earlier launch\n")
    program = f"""
        from bus.errors import {refusal.__name__}
        from launch.process.runtime import fail
        print("loading")
        fail({refusal.__name__}("prompts.jsonl, line 3: not JSON\\nsecond line"))
    """
    await supervisor.start(part("refusing", program))
    error = await failure_of(supervisor)

    assert type(error) is refusal
    assert str(error) == "prompts.jsonl, line 3: not JSON\nsecond line"
    assert supervisor.restarts == 0


@pytest.mark.slow
async def test_a_part_whose_bus_is_away_is_started_again_however_often(supervisor: Supervisor):
    program = """
        from bus.errors import BusAwayError
        from launch.process.runtime import fail
        fail(BusAwayError("the bus was away for 3600 s"))
    """
    away = part("waiting", program)
    await supervisor.start(away)
    stop = asyncio.Event()
    watching = asyncio.create_task(supervisor.watch(stop))
    await until(lambda: supervisor.restarts > IMPATIENT.restarts)
    assert away.failed == []
    stop.set()
    await watching


async def test_a_long_log_is_continued_in_an_empty_file(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(log_files, "LOG_BYTES", 5000)
    monkeypatch.setattr(supervising, "LOG_CHECK_S", 0.01)
    program = """
        import time
        while True:
            print("x" * 99, flush=True)
            time.sleep(0.001)
    """
    await supervisor.start(part("talking", program))
    stop, log = asyncio.Event(), tmp_path / "talking.log"
    watching = asyncio.create_task(supervisor.watch(stop))
    await until((tmp_path / "talking.log.1").exists)
    before = (tmp_path / "talking.log.1").stat().st_mtime_ns
    await until(lambda: (tmp_path / "talking.log.1").stat().st_mtime_ns > before)
    await until(lambda: log.read_bytes()[:1] == b"x")  # it begins anew, without a hole
    stop.set()
    await watching


async def test_the_run_is_over_when_the_part_that_ends_it_is_done(supervisor: Supervisor):
    await supervisor.start(part("serving", SERVE))
    await supervisor.start(part("working", "pass", ends_run=True))
    async with asyncio.timeout(WAIT_S):
        await supervisor.watch(asyncio.Event())


async def test_parts_stop_together_and_those_that_serve_them_after_them_the_first_started_last(
    supervisor: Supervisor, tmp_path: Path
):
    program = f"""
        import pathlib, signal, sys, time
        ends = pathlib.Path({str(tmp_path / "ends")!r})
        others = {{"learner": "actors asked", "actors": "learner asked"}}
        def end(*_):
            ends.open("a").write(f"{{sys.argv[1]}} asked, ")
            while others.get(sys.argv[1], "") not in ends.read_text():
                time.sleep(0.01)
            time.sleep(0.05)
            ends.open("a").write(f"{{sys.argv[1]}} ended, ")
            sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        print("ready", flush=True)
        time.sleep(600)
    """
    for name in ("bus", "storage", "actors", "learner"):
        started = part(name, program, serves=name in ("bus", "storage"))
        started.command = (*started.command, name)
        await supervisor.start(started)
        await until(lambda name=name: "ready" in (tmp_path / f"{name}.log").read_text())

    await supervisor.end(except_part="bus")
    *both, asked, ended = (tmp_path / "ends").read_text().split(", ")[:-1]
    assert {*both[:2]} == {"learner asked", "actors asked"}
    assert {*both[2:]} == {"learner ended", "actors ended"}
    assert (asked, ended) == ("storage asked", "storage ended")
    assert supervisor.pids("bus")

    await supervisor.end()
    assert (tmp_path / "ends").read_text().endswith("storage ended, bus asked, bus ended, ")


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


async def test_a_part_that_ignores_the_request_to_stop_is_killed_with_its_children(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(supervising, "SAY_AFTER_S", 0.05)
    await supervisor.start(part("stubborn", STUBBORN, drain_s=0.1))
    log = tmp_path / "stubborn.log"
    await until(lambda: log.read_text().endswith("\n"))
    child = int(log.read_text())

    with capture_logs() as said:
        await supervisor.end()

    assert [one["event"] for one in said] == ["part_still_ends", "part_killed"]
    assert supervisor.pids("stubborn") == []
    await until(lambda: not alive(child))


async def test_after_a_failure_nobody_waits_long_for_the_part_that_failed(tmp_path: Path):
    policy = SupervisionConfig(restarts=0, window_s=60, failed_drain_s=0.1)
    supervisor = Supervisor(tmp_path, policy=policy)
    await supervisor.start(part("stubborn", STUBBORN, drain_s=600))
    await until(lambda: (tmp_path / "stubborn.log").read_text().endswith("\n"))
    await supervisor.start(part("failing", "raise SystemExit(1)"))
    await failure_of(supervisor)
    async with asyncio.timeout(WAIT_S):
        await supervisor.end()


async def test_a_second_request_to_stop_kills_every_part_at_once(supervisor: Supervisor, tmp_path: Path):
    for name in ("one", "two"):
        await supervisor.start(part(name, STUBBORN))
        await until(lambda name=name: (tmp_path / f"{name}.log").read_text().endswith("\n"))
    ending = asyncio.create_task(supervisor.end())
    await asyncio.sleep(0.1)

    began = time.monotonic()
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending

    await until(lambda: not supervisor.pids("one") and not supervisor.pids("two"))
    assert time.monotonic() - began < 30  # far below the time to drain


async def test_starting_waits_until_a_part_is_ready(supervisor: Supervisor, tmp_path: Path):
    log = tmp_path / "serving.log"

    async def ready() -> bool:
        return "ready" in log.read_text()

    async with asyncio.timeout(WAIT_S):
        await supervisor.start(part("serving", SERVE), ready=ready)
    assert await ready()


async def test_a_part_that_ends_before_it_is_ready_is_an_error(supervisor: Supervisor):
    async def never() -> bool:
        return False

    with pytest.raises(SluiceError, match="no such luck"):
        await supervisor.start(part("failing", 'raise SystemExit("no such luck")'), ready=never)


async def test_a_part_that_is_killed_before_it_is_ready_is_started_again(
    supervisor: Supervisor, tmp_path: Path
):
    program = f"""
        import os, pathlib, time
        lives = pathlib.Path({str(tmp_path)!r}, "lives")
        with lives.open("a") as file:
            file.write("x")
        if len(lives.read_text()) < 3:
            os.kill(os.getpid(), 9)
        time.sleep(600)
    """

    async def in_its_third_life() -> bool:
        lives = tmp_path / "lives"
        return lives.exists() and len(lives.read_text()) == 3

    async with asyncio.timeout(30):
        await supervisor.start(part("starting", program), ready=in_its_third_life)
    assert supervisor.restarts == 2


async def test_log_files_are_appended_to(supervisor: Supervisor, tmp_path: Path):
    (tmp_path / "failing.log").write_text("of yesterday\n")
    await supervisor.start(part("failing", 'raise SystemExit("once more")'))
    await failure_of(supervisor)
    assert (tmp_path / "failing.log").read_text().split("\n") == ["of yesterday", *["once more"] * 3, ""]


@pytest.mark.nats
@pytest.mark.slow
def test_nothing_outlives_a_supervisor_that_was_killed(tmp_path: Path):
    """The kernel tells the parts, and the bus part its nats-server."""
    program = f"""
        import asyncio, pathlib, sys
        from launch.local.supervisor import Part, Supervisor

        async def main():
            logs = pathlib.Path({str(tmp_path)!r})
            supervisor = Supervisor(logs)
            bus = (sys.executable, "-m", "launch", "bus", "--port", "0", "--directory", str(logs / "bus"))
            await supervisor.start(Part("bus", bus))
            await supervisor.start(Part("serving", (sys.executable, "-c", {SERVE!r})))
            await asyncio.sleep(600)

        asyncio.run(main())
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    try:
        deadline = time.monotonic() + WAIT_S
        log = tmp_path / "bus.log"
        while not (log.exists() and "bus_ready" in log.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        family = psutil.Process(process.pid).children(recursive=True)
        assert {"nats-server"} < {child.name() for child in family}
    finally:
        process.kill()
        process.wait()
    _, left = psutil.wait_procs(family, timeout=WAIT_S)
    assert left == []


ORPHAN = """
    import asyncio
    from launch.process import runtime

    runtime.ORPHAN_DRAIN_S = 0.1

    async def main(stop):
        print("ready", flush=True)
        await asyncio.sleep(600)  # deaf to `stop`, as one that waits for a bus

    runtime.run(main)
"""


@pytest.mark.parametrize("orphan", [True, False])
def test_only_a_part_without_its_supervisor_is_hurried(orphan: bool):
    supervisor = 1 if orphan else os.getpid()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(ORPHAN)],
        env=os.environ | {SUPERVISOR: str(supervisor)},
        stdout=subprocess.PIPE,
    )
    with process:
        process.stdout.readline()
        process.terminate()
        try:
            process.wait(WAIT_S if orphan else 0.5)
        except subprocess.TimeoutExpired:
            assert not orphan
        process.terminate()  # a second time
        assert process.wait(WAIT_S) == KILLED


def test_complaints_are_found_among_other_output():
    output = "12:00 loading\nlaunch: one\n        more of one\nlaunch: two\nnot indented\n"
    assert complaints(output) == ["one\nmore of one", "two"]


async def test_a_part_has_its_own_variables_beside_those_of_all(tmp_path: Path, supervisor: Supervisor):
    program = "import os; print(os.environ['PATH'] != '', os.environ['CUDA_VISIBLE_DEVICES'], flush=True)"
    await supervisor.start(part("shows", program, environment={"CUDA_VISIBLE_DEVICES": "3"}, ends_run=True))
    async with asyncio.timeout(WAIT_S):
        await supervisor.watch(asyncio.Event())
    assert (tmp_path / "shows.log").read_text() == "True 3\n"
