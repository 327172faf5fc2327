"""Programs of agents: who they are, what ends them, and what a host that allows no namespaces says."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from actors.environments.agent_program import needed_files
from actors.programs import hidden, memory_groups
from actors.programs import runner as actor_side
from actors.programs.runner import Program, ProgramEnd, ProgramError, ProgramRunner
from actors.sandboxes import control_groups
from actors.settings.agents import IsolationConfig
from bus.errors import ConfigError
from tests.actors.environments.agent_programs import running
from tests.actors.gateway.served import until
from tests.actors.programs.memory_kills import short_of_memory, taking

VARIABLES = {"PATH": os.environ["PATH"]}


async def ran(runner: ProgramRunner, script: str, **more: object) -> ProgramEnd:
    with runner.directory() as directory:
        program = Program(command=["sh", "-c", script], variables=VARIABLES, directory=directory, **more)
        return await runner.run(program, timeout_s=20, most_output_bytes=1 << 16)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts programs as others")
@pytest.mark.parametrize("allows_namespaces", [True, False])
async def test_root_may_run_programs_as_an_ordinary_user(monkeypatch, allows_namespaces):
    if not allows_namespaces:
        monkeypatch.setattr(actor_side, "_tried", lambda *_: "it does not")
    runner = ProgramRunner(IsolationConfig(user="54321"))
    end = await ran(runner, "id -u; id -g; touch mine && ls")
    assert end.output.split() == ["54321", "54321", "mine"]
    await runner.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts programs as others")
async def test_what_is_hidden_may_lie_where_the_programs_user_does_not_reach(monkeypatch):
    """As the caches and keys in root's home do."""
    monkeypatch.setattr(hidden, "_hidden", set())
    with tempfile.TemporaryDirectory(dir="/var/tmp") as home:  # mode 0700
        (Path(home) / "keys").mkdir()
        hidden.hide([Path(home) / "keys"])
        runner = ProgramRunner(IsolationConfig(user="54321"))
        assert (await ran(runner, f"id -u; ls {home}/keys 2>/dev/null || echo no")).output.split() == [
            "54321",
            "no",
        ]
        await runner.close()


async def test_directory_to_write_may_lie_in_one_to_read(tmp_path):
    (tmp_path / "inside").mkdir()
    runner = ProgramRunner(IsolationConfig(readable=(tmp_path,), writable=(tmp_path / "inside",)))
    end = await ran(runner, f"echo yes > {tmp_path}/inside/there; touch {tmp_path}/here")
    assert (tmp_path / "inside/there").read_text() == "yes\n"
    assert "Read-only" in end.output
    await runner.close()


async def test_hidden_file_stays_hidden_whatever_may_be_read_or_written_around_it(tmp_path, monkeypatch):
    monkeypatch.setattr(hidden, "_hidden", set())
    names = ("labels", "in/labels", "in/agent", "open", "later")
    labels, inner, agent, beside, later = (tmp_path / name for name in names)
    inner.parent.mkdir()
    (tmp_path / "link").symlink_to(labels)
    hidden.hide([tmp_path / "link", inner.parent, later])
    for path in (labels, inner, agent, beside):
        path.write_text(f"{path.name} told\n")
    isolation = IsolationConfig(readable=(tmp_path, labels), writable=(agent, inner.parent))
    runner = ProgramRunner(isolation)
    later.write_text("later told\n")  # it is hidden although it was not there when it was named
    script = f"cd {tmp_path}; cat labels link in/labels later in/agent open; ls in"
    said = (await ran(runner, script)).output
    assert [line for line in said.splitlines() if "cat:" not in line] == ["agent told", "open told", "agent"]
    await runner.close()


@pytest.mark.parametrize("user", [None, "54321"] if os.geteuid() == 0 else [None])
async def test_program_finds_terminals_of_its_own_and_no_disk(user):
    runner = ProgramRunner(IsolationConfig(user=user))
    script = "echo said | cat /dev/stdin; echo > /dev/null && exec 3<>/dev/ptmx; ls /dev/pts; ls /dev"
    found = (await ran(runner, script)).output.split()
    assert found[:3] == ["said", "0", "ptmx"]
    usual = {"fd", "full", "null", "ptmx", "pts", "random", "shm", "tty", "urandom", "zero"}
    devices = {name for name in found[3:] if not name.startswith(("nvidia", "dri", "kfd", "std"))}
    assert devices == usual
    await runner.close()


async def test_program_reads_its_script_and_nothing_that_lies_beside_it_below_tmp(tmp_path):
    (tmp_path / "agent.py").write_text("import os, sys; print(os.listdir(sys.path[0]))")
    (tmp_path / "answers.json").write_text("LABEL")
    command = [sys.executable, str(tmp_path / "agent.py")]
    runner = ProgramRunner(IsolationConfig())
    with runner.directory() as directory:
        program = Program(
            command=command, variables=VARIABLES, directory=directory, readable=needed_files(command)
        )
        ended = await runner.run(program, timeout_s=20, most_output_bytes=1 << 16)
    assert ended == ProgramEnd(0, "['agent.py']")
    await runner.close()


async def test_what_a_program_is_handed_can_be_read_once():
    runner = ProgramRunner(IsolationConfig())
    end = await ran(runner, "cat; cat; cat /proc/self/fd/0; cat /proc/$$/fd/0", handed=b"secret ")
    assert end.output == "secret"
    await runner.close()


async def test_host_without_namespaces_is_told_once_or_refused(monkeypatch, capsys):
    monkeypatch.setattr(actor_side, "_tried", lambda *_: "unshare: Operation not permitted")
    runner = ProgramRunner(IsolationConfig())
    for _ in range(2):
        assert (await ran(runner, "echo here")).output == "here"
    await runner.close()
    said = capsys.readouterr().out
    assert said.count("programs_are_not_isolated") == 1
    assert "write on a bus without credentials" in said
    with pytest.raises(ConfigError, match=r"no namespaces \(unshare: Operation not permitted\)"):
        ProgramRunner(IsolationConfig(required=True))


KEYS = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
add, ask, control = (248, 249, 250) if os.uname().machine == "x86_64" else (217, 218, 219)
def call(*arguments):
    done = libc.syscall(*arguments)
    return done if done >= 0 else -ctypes.get_errno()
if len(sys.argv) == 1:
    print(call(add, b"user", b"judge", b"SECRET", 6, -3), call(add, b"user", b"judge", b"SECRET", 6, -4))
else:
    read = ctypes.create_string_buffer(6)
    for key in map(int, sys.argv[1:]):
        print(call(control, 11, key, read, 6), call(control, 8, key, -2), read.value.decode())
    print(call(add, b"user", b"mine", b"x", 1, -2), call(ask, b"user", b"judge", None, 0))
"""


async def test_program_reads_no_key_that_its_actors_user_keeps_in_the_kernel():
    kept = await asyncio.to_thread(subprocess.check_output, [sys.executable, "-c", KEYS], text=True)
    assert min(map(int, kept.split())) > 0, "this kernel keeps no keys"
    runner = ProgramRunner(IsolationConfig())
    with runner.directory() as directory:
        command = [sys.executable, "-c", KEYS, *kept.split()]
        program = Program(command=command, variables=VARIABLES, directory=directory)
        said = (await runner.run(program, timeout_s=20, most_output_bytes=1 << 16)).output
    assert said.split() == ["-1"] * 6
    await runner.close()


@pytest.mark.parametrize("allows_namespaces", [True, False])
async def test_where_memory_is_short_the_kernel_ends_a_program_before_its_actor(
    monkeypatch, allows_namespaces
):
    if not allows_namespaces:
        monkeypatch.setattr(actor_side, "_tried", lambda *_: "it does not")
    runner = ProgramRunner(IsolationConfig())
    script = "cat /proc/self/oom_score_adj; echo -500 > /proc/self/oom_score_adj"
    end = await ran(runner, f"{script} || cat /proc/self/oom_score_adj")
    assert [line for line in end.output.splitlines() if line.isdecimal()] == ["1000", "1000"]
    await runner.close()


@pytest.mark.parametrize(("takes_mb", "blames_the_host"), [(30, True), (100, False)])
async def test_kill_for_memory_is_the_hosts_fault_where_the_program_took_no_more_than_its_share(
    monkeypatch, tmp_path, takes_mb, blames_the_host
):
    monkeypatch.setattr(memory_groups, "memory_bytes", lambda: 120 << 20)
    with short_of_memory(120) as above:
        monkeypatch.setattr(control_groups, "_candidates", lambda _: [above.path])
        runner = ProgramRunner(IsolationConfig(writable=(tmp_path,)), at_once=2)
        taken = f'x = bytearray({takes_mb} << 20); open("{tmp_path}/taken", "w"); import time; time.sleep(60)'
        running = asyncio.create_task(ran(runner, f"{sys.executable} -S -c '{taken}'; kill -9 $$"))
        await until((tmp_path / "taken").exists, "the program to take its memory")
        assert await taking(above, 100) == 0
        with pytest.raises(ProgramError, match="had no memory left") if blames_the_host else nullcontext():
            assert (await running).status == -9
        assert not [path for path in above.path.iterdir() if path.is_dir()], "its group is gone"
        await runner.close()


async def test_without_control_groups_of_memory_no_kill_is_the_hosts_fault(monkeypatch):
    monkeypatch.setattr(control_groups, "own_groups", lambda _: [])
    with capture_logs() as logs:
        runner = ProgramRunner(IsolationConfig())
    [told] = [one for one in logs if one["event"] == "memory_of_programs_is_not_counted"]
    assert "no control groups of the controller memory are mounted" in told["reason"]
    assert (await ran(runner, "kill -9 $$")).status == -9
    await runner.close()


async def test_process_that_starts_programs_is_started_again_when_somebody_kills_it():
    runner = ProgramRunner(IsolationConfig())
    runner._server.process.kill()
    runner._server.process.wait()
    assert (await ran(runner, "echo here")).output == "here"
    await runner.close()


ACTOR = """
import asyncio, sys
from actors.settings.agents import IsolationConfig
from actors.programs.runner import Program, ProgramRunner
async def main():
    runner = ProgramRunner(IsolationConfig())
    with runner.directory() as directory:
        script = "setsid setsid sleep 60.317 & sleep 60.317"
        program = Program(command=["sh", "-c", script], variables={"PATH": sys.argv[1]}, directory=directory)
        print(directory, flush=True)
        await runner.run(program, timeout_s=None, most_output_bytes=None)
asyncio.run(main())
"""


async def test_actor_that_is_killed_takes_its_programs_and_their_daemons_along():
    actor = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ACTOR, os.environ["PATH"], stdout=asyncio.subprocess.PIPE
    )
    assert actor.stdout is not None
    directory = (await asyncio.wait_for(actor.stdout.readline(), 30)).decode().strip()
    await until(lambda: len(running("60.317")) > 3, "the program and its daemon")
    actor.send_signal(signal.SIGKILL)
    await actor.wait()
    await until(lambda: not running("60.317"), "their ends")
    shutil.rmtree(directory)
