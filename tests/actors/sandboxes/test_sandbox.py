"""What a program in the sandbox can do, and how its end is told."""

import asyncio
import contextlib
import os
import platform
import subprocess
import sys

import psutil
import pytest

from actors.episodes.errors import ToolError
from actors.sandboxes import server
from actors.sandboxes import server_process as actor_side
from actors.sandboxes.jail import Host
from actors.sandboxes.limits import Limits
from actors.sandboxes.sandbox import Sandbox
from bus.errors import ConfigError

SHORT = Limits(wall_s=1.5)


@pytest.fixture(scope="module")
def shared():
    sandbox = Sandbox(Limits(), at_once=8)
    yield sandbox
    asyncio.run(sandbox.close())


@contextlib.asynccontextmanager
async def sandbox_of(limits, **settings):
    sandbox = Sandbox(limits, **settings)
    try:
        yield sandbox
    finally:
        await sandbox.close()


async def test_a_program_prints_reads_and_ends(shared):
    ran = await shared.run("import sys\nprint(input() * 2)\nprint('x', file=sys.stderr)\nsys.exit(3)", "ab\n")
    assert (ran.stdout, ran.stderr, ran.end, ran.status) == ("abab\n", "x\n", "exited", 3)
    ran = await shared.run("from math import pi\nif __name__ == '__main__':\n  print(round(pi, 2))")
    assert (ran.stdout, ran.stderr, ran.status) == ("3.14\n", "", 0)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("x = 1\nx / 0", 'File "program.py", line 2, in <module>\n    x / 0'),
        ("print(", "SyntaxError"),
        ("a = '\0'", "null bytes"),
        ("raise SystemExit('no')", "no\n"),
        ("print('\\ud800')", "UnicodeEncodeError"),
        ("class E(BaseException): pass\nraise E", "E\n"),
    ],
)
async def test_a_programs_error_is_told_as_the_interpreter_tells_it(shared, code, said):
    ran = await shared.run(code)
    assert said in ran.stderr
    assert ran.status == 1
    assert "actors" not in ran.stderr  # the traceback begins with the program


async def test_code_that_is_no_unicode_and_output_that_is_no_utf8_harm_nobody(shared):
    ran = await shared.run("print('\ud800')")
    assert (ran.status, "surrogates not allowed" in ran.stderr) == (1, True)
    ran = await shared.run("import sys; sys.stdout.buffer.write(b'a\\xff\\0b')")
    assert ran.stdout == "a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}b"


async def test_programs_run_at_a_time_and_apart(shared):
    code = "import time\nopen('mine', 'x').write({n!r})\ntime.sleep(0.2)\nprint(open('mine').read())"
    ran = await asyncio.gather(*(shared.run(code.format(n=str(n))) for n in range(8)))
    assert [r.stdout for r in ran] == [f"{n}\n" for n in range(8)]


async def test_at_most_so_many_programs_run_at_once():
    async with sandbox_of(Limits(), at_once=1) as sandbox:
        programs = [asyncio.create_task(sandbox.run("import time; time.sleep(0.1)")) for _ in range(2)]
        await asyncio.wait(programs, return_when=asyncio.FIRST_COMPLETED)
        assert [program.done() for program in programs] == [True, False]
        await programs[1]


async def test_a_program_that_does_not_end_is_stopped():
    async with sandbox_of(SHORT) as sandbox:
        ran = await sandbox.run("import time\nprint('begun', flush=True)\nwhile True: time.sleep(9)")
        assert (ran.end, ran.stdout) == ("time", "begun\n")
        assert SHORT.wall_s <= ran.took_s < 30
        ignoring = "from signal import *\nfor n in {*range(1, 32)} - {9, 19}: signal(n, SIG_IGN)\n"
        assert (await sandbox.run(ignoring + "while True: pass")).end == "time"


@pytest.mark.slow
async def test_a_program_that_uses_up_its_processor_time_is_stopped():
    async with sandbox_of(Limits(cpu_s=1, wall_s=60)) as sandbox:
        assert (await sandbox.run("while True: pass")).end == "cpu"


@pytest.mark.slow
async def test_a_program_that_gives_itself_less_processor_time_has_ended_itself(shared):
    code = "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (0, 0))\nwhile True: pass"
    assert (await shared.run(code)).end == "cpu"


SPEAK = "import os\nos.write(3, b'ping')\nprint(os.read(3, 9), os.read(3, 9))"
ANSWER = "import os\nos.write(3, os.read(3, 9) + b'pong')"


async def test_two_programs_talk_and_are_apart_otherwise(shared):
    ran, other = await shared.run_joined(SPEAK, ANSWER)
    assert (ran.stdout, other.end) == ("b'pingpong' b''\n", "exited")
    ran, _ = await shared.run_joined("open('mine', 'w')\nprint(input())\n" + SPEAK, ANSWER, "told\n")
    assert ran.stdout.startswith("told\nb'ping")
    shown = "import os\nprint(os.getpid(), os.listdir('.'), os.fstat(3) and [])\nos.fstat(4)"
    both = await shared.run_joined(f"import os\nos.read(3, 1)\n{shown}", shown)
    assert [one.stdout for one in both] == ["1 [] []\n"] * 2
    assert ["Bad file descriptor" in one.stderr for one in both] == [True, True]


async def test_the_other_program_ends_with_the_first(shared):
    ran, other = await shared.run_joined("print(1)", "while True: pass")
    assert (ran.stdout, ran.end, other.end) == ("1\n", "exited", "stopped")
    ran, other = await shared.run_joined("import os\nprint(os.read(3, 9))", "import os\nos._exit(3)")
    assert (ran.stdout, other.end, other.status) == ("b''\n", "exited", 3)


def test_a_program_that_was_gone_when_it_was_to_be_stopped_has_ended_by_itself(monkeypatch):
    """The actor hangs up a moment before this, and the kernel has said nothing of the program by then."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    monkeypatch.setattr(server, "ended_before", lambda *_: (False, True))
    assert server._wait(child.pid, None, 1.0, Host()) is None
    assert child.wait() == 0


SLOW_TO_GO = """
import os, time
here, there = os.pipe()
for _ in range(3):
  if os.fork() == 0:
    os.close(3)
    held = bytearray(100 << 20)
    os.write(there, b"1")
    time.sleep(99)
for _ in range(3):
  os.read(here, 1)
"""
"""A program that is gone only when the kernel has taken back what its children hold."""


async def test_a_program_that_ends_is_not_stopped_on_its_way_out():
    """Its peer sees the socket close, and ends, before it is gone itself."""
    wait = "import os\nos.read(3, 9)"
    async with sandbox_of(Limits(processes=8)) as sandbox:
        _, other = await sandbox.run_joined(wait, SLOW_TO_GO + "os._exit(3)")
        assert (other.end, other.status) == ("exited", 3)
        task = asyncio.create_task(sandbox.run_joined(wait, SLOW_TO_GO + "time.sleep(99)"))
        async with asyncio.timeout(30):
            held = []
            while not held:
                held = [one for one in programs_of(sandbox) if holds_memory(one)]
                await asyncio.sleep(0.01)
        held[0].kill()
        with pytest.raises(ToolError, match="killed by its host"):
            await task


def holds_memory(program):
    try:
        children = program.children()
        return len(children) == 3 and all(one.memory_info().rss > 100 << 20 for one in children)
    except psutil.NoSuchProcess:  # one of the programs before
        return False


async def test_a_program_whose_main_thread_ends_alone_is_stopped():
    code = (
        "import ctypes, os, threading, time\n"
        "threading.Thread(target=lambda: (os.write(3, b'1'), time.sleep(99))).start()\n"
        f"ctypes.CDLL(None).syscall({93 if platform.machine() == 'aarch64' else 60}, 0)"
    )
    async with sandbox_of(Limits(processes=8)) as sandbox:
        _, other = await sandbox.run_joined("import os, time\nos.read(3, 1)\ntime.sleep(0.2)", code)
    assert other.end == "stopped"


@pytest.mark.slow
async def test_two_programs_may_be_given_more_time_also_of_the_processor():
    busy = "import time\nwhile time.process_time() < 1.3: pass\nprint(1)"
    async with sandbox_of(Limits(wall_s=1, cpu_s=1)) as sandbox:
        ran, _ = await sandbox.run_joined(busy, "", wall_s=300)
        assert (ran.stdout, ran.end) == ("1\n", "exited")
        ran, _ = await sandbox.run_joined(busy, "")
        assert ran.end in {"time", "cpu"}


async def test_the_first_program_may_end_before_the_other_has_begun(shared):
    both = await asyncio.gather(*(shared.run_joined("", "while True: pass") for _ in range(16)))
    assert {(ran.end, other.end) for ran, other in both} == {("exited", "stopped")}


async def test_the_host_killing_one_of_two_programs_says_nothing_about_the_model():
    async with sandbox_of(Limits(wall_s=60)) as sandbox:
        wait = "import os\nos.read(3, 9)"
        task = asyncio.create_task(sandbox.run_joined(wait, "import time\ntime.sleep(99)"))
        server = sandbox._server.process.pid
        async with asyncio.timeout(30):
            while True:
                found = [one for one in programs_of(sandbox) if one.ppid() != server]
                if len(found) == 2 and all(one.num_fds() <= 4 for one in found):
                    break
                await asyncio.sleep(0.01)
        found[1].kill()
        with pytest.raises(ToolError, match="killed by its host"):
            await task


async def test_a_program_that_prints_without_end_is_stopped_and_its_output_cut(shared):
    ran = await shared.run("while True: print('x' * 999)")
    assert (ran.end, len(ran.stdout)) == ("output", 1 << 16)
    ran = await shared.run("import sys\nsys.stderr.write('y' * 100_000_000)")
    assert (ran.end, len(ran.stderr)) == ("output", 1 << 16)
    assert (
        await shared.run(f"print('z' * {(1 << 16) - 1})")
    ).end == "exited"  # exactly as much as is allowed


async def test_nothing_of_a_program_goes_on_after_its_end():
    async with sandbox_of(Limits(processes=8)) as sandbox:
        ran = await sandbox.run(
            "import os, time\nif os.fork() == 0:\n  os.setsid(); time.sleep(99)\nprint('over')"
        )
        assert (ran.stdout, ran.end) == ("over\n", "exited")  # its child held the output open
        assert not (await asyncio.to_thread(psutil.wait_procs, programs_of(sandbox), 10))[1]


async def test_a_program_ends_with_the_task_that_waits_for_it():
    async with sandbox_of(Limits(wall_s=60)) as sandbox:
        task = asyncio.create_task(sandbox.run("import time\ntime.sleep(99)"))
        running = await until_running(sandbox)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gone, left = await asyncio.to_thread(psutil.wait_procs, running, 10)
        assert (len(gone), left) == (2, [])


async def test_a_program_that_the_host_kills_says_nothing_about_the_model():
    async with sandbox_of(Limits(wall_s=60)) as sandbox:
        task = asyncio.create_task(sandbox.run("import time\ntime.sleep(99)"))
        _, program = await until_running(sandbox)
        program.kill()  # as the kernel does when memory is short
        with pytest.raises(ToolError, match="killed by its host"):
            await task


async def test_a_sandbox_whose_processes_die_fails_what_runs_and_starts_again():
    async with sandbox_of(Limits(wall_s=60)) as sandbox:
        task = asyncio.create_task(sandbox.run("import time\ntime.sleep(99)"))
        watcher, program = await until_running(sandbox)
        sandbox._server.process.kill()
        watcher.kill()
        with pytest.raises(ToolError, match="the process that watches a program was ended"):
            await task
        assert not (await asyncio.to_thread(psutil.wait_procs, [program], 10))[1]
        await asyncio.to_thread(sandbox._server.process.wait, 10)
        assert (await sandbox.run("print(1)")).stdout == "1\n"


async def test_the_sandbox_ends_with_its_owner():
    sandbox = Sandbox(Limits())
    process = sandbox._server.process
    del sandbox
    assert process.returncode == 0


async def test_modules_that_were_loaded_before_are_there():
    async with sandbox_of(Limits(preload=("fractions",))) as sandbox:
        ran = await sandbox.run("import sys; print('fractions' in sys.modules, 'actors' in sys.modules)")
        assert ran.stdout == "True False\n"
    with pytest.raises(ConfigError, match=r"no_such_module.*leave it out of the tool's `packages`"):
        Sandbox(Limits(preload=("no_such_module",)))


def test_a_host_that_forbids_namespaces_is_told_at_the_start_with_a_remedy(monkeypatch):
    forbid = (
        "import os, runpy, sys; sys.argv = sys.argv[1:]; sys.path.insert(0, sys.argv.pop(0));"
        "from actors.sandboxes.kernel import drop_capabilities;"
        "from actors.sandboxes.system_calls import filter_program, install_filter;"
        "drop_capabilities(); install_filter(filter_program(os.uname().machine));"
        "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
    )
    root = str(__file__).partition("/tests/")[0]
    monkeypatch.setattr(
        actor_side, "module_command", lambda *arguments: (sys.executable, "-c", forbid, root, *arguments)
    )
    with pytest.raises(ConfigError, match=r"allows no sandbox \(.*unshare.*not permitted.*unconfined"):
        Sandbox(Limits())


def test_another_system_is_a_config_error(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="needs Linux on x86_64 or aarch64"):
        Sandbox(Limits())


def programs_of(sandbox):
    return psutil.Process(sandbox._server.process.pid).children(recursive=True)


async def until_running(sandbox):
    """Return the watching process and the program's, once the program has nothing open but its streams."""
    async with asyncio.timeout(30):
        while len(found := programs_of(sandbox)) < 2 or found[1].num_fds() > 3:  # noqa: ASYNC110  # it is no task
            await asyncio.sleep(0.01)
    return found
