"""Sandboxes of episodes in namespaces: commands, files, limits, and ways out that an adversary would try."""

import asyncio
import os
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from actors.episode_sandboxes.base import Command, EpisodeSandbox, SandboxFileError
from actors.episode_sandboxes.cpu_groups import CpuGroups
from actors.episode_sandboxes.namespaces import NamespaceBackend, NamespaceSandbox
from actors.episodes.errors import ToolError
from actors.programs import hidden
from actors.sandboxes import control_groups
from actors.sandboxes.owner import this_process
from actors.settings.episode_sandboxes import NamespaceSandboxes, SandboxLimits
from bus.errors import ConfigError
from tests.actors.episode_sandboxes.backends import said, sandbox_of, shell
from tests.actors.sandboxes.sandboxes import start_as_ordinary_user


@pytest.fixture
async def sandbox():
    async with sandbox_of(memory_mb=256, processes=32, disk_mb=4) as one:
        yield one


async def test_commands_share_files_and_processes_and_say_how_they_ended(sandbox):
    ran = await shell(sandbox, "echo out; echo err >&2; pwd; exit 3")
    assert (ran.stdout, ran.stderr, ran.end, ran.status) == (b"out\n/workspace\n", b"err\n", "exited", 3)
    started = time.monotonic()
    assert await said(sandbox, "sleep 100 & echo $! > pid; echo begun") == "begun\n"
    assert time.monotonic() - started < 10  # what goes on in the background holds nobody up
    assert await said(sandbox, "kill -0 $(cat pid) && echo runs") == "runs\n"
    assert (await shell(sandbox, "kill -9 $$")).status == -9
    for words in (("no-such-program",), ("/bin/sh\0",)):
        missing = await sandbox.run(Command(words=words, timeout_s=20))
        assert (missing.status, missing.stderr[:2]) == (127, words[0].encode()[:2])
    assert await said(
        sandbox, "cat; echo $A", stdin=b"x" * 70_000, variables={"A": "b"}, output_bytes=80_000
    ) == ("x" * 70_000 + "b\n")
    both = await asyncio.gather(
        said(sandbox, "mkfifo p; cat p"), said(sandbox, "until [ -p p ]; do :; done; echo x > p")
    )
    assert both == ["x\n", ""]  # they run side by side


async def test_files_are_written_read_packed_and_brought_back(sandbox):
    await sandbox.write("a/b c", b"\0\xff" * 100)
    assert await sandbox.read("/workspace/a/b c") == b"\0\xff" * 100
    snapshot = await sandbox.snapshot()
    await said(sandbox, "rm -r a; touch .hidden d; ln -s / link")
    await sandbox.restore(snapshot)
    assert await said(sandbox, "find . | sort") == ".\n./a\n./a/b c\n"
    await sandbox.upload(snapshot, "/tmp/other")
    assert await sandbox.read("/tmp/other/a/b c") == b"\0\xff" * 100
    with pytest.raises(SandboxFileError, match="No such file"):
        await sandbox.read("a/nothing")
    await said(sandbox, "head -c 3M /dev/zero > log; (touch ticks; while echo >> log; do :; done) &")
    assert b"ticks" in await sandbox.snapshot(), "although files change meanwhile"
    with pytest.raises(SandboxFileError, match="more than 10 bytes"):
        await sandbox.read("a/b c", most_bytes=10)
    with pytest.raises(SandboxFileError, match="No space left"):
        await sandbox.write("large", b"x" * (5 << 20))


async def test_a_command_that_passes_a_limit_is_ended_with_all_that_it_started_and_the_sandbox_goes_on(
    sandbox,
):
    daemon = "(setsid setsid sleep 55 &) ; sleep 56"
    ran = await shell(sandbox, daemon, timeout_s=0.3)
    assert (ran.end, ran.status) == ("time", -9)
    assert (
        await said(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 5[56]' || true")
        == "0\n"
    )
    ran = await shell(sandbox, "yes", output_bytes=1000)
    assert (ran.end, len(ran.stdout)) == ("output", 1000)
    hoard = f"{sys.executable} -c 'x = bytearray(150 << 20); import time; time.sleep(60)'"
    ran = await shell(sandbox, f"echo kept > f; {hoard} & {hoard}")
    assert ran.end == "memory"
    assert (
        await said(sandbox, "cat f; cat /proc/[0-9]*/cmdline | grep -c 'bytearra[y]' || true") == "kept\n0\n"
    )
    ran = await shell(sandbox, ":(){ :|:& };:", timeout_s=2)
    assert await said(sandbox, "echo goes on") == "goes on\n"
    assert (
        "o space" in (await shell(sandbox, "yes > f; for n in $(seq 2000); do : > $n; done")).stderr.decode()
    )


async def test_a_sandbox_is_held_to_its_processors():
    groups = CpuGroups.found()
    if groups is None:
        pytest.skip("needs control groups that this user may make")
    left = groups.made(1.0).path
    dead = left.rename(left.with_name(f"sluice-sandbox-{this_process().rpartition('-')[0]}-1-x"))
    async with sandbox_of(cpus=0.01) as sandbox:
        assert not dead.exists()
        group = sandbox.running._group.path
        assert group.name in await said(sandbox, "cat /proc/self/cgroup")
        await said(sandbox, "yes > /dev/null & yes > /dev/null &")
        async with asyncio.timeout(60):
            while "nr_throttled 0\n" in (group / "cpu.stat").read_text():  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.01)
    assert not group.exists()


async def test_without_control_groups_the_actor_goes_before_its_sandboxes(monkeypatch):
    monkeypatch.setattr(control_groups, "own_groups", lambda _: [])
    with capture_logs() as logs:
        async with sandbox_of() as sandbox:
            assert int(await said(sandbox, "nice")) == min(os.nice(0) + 10, 19)
    [told] = [one for one in logs if one["event"] == "sandboxes_are_not_limited"]
    assert told["limits"] == ["cpus"]


async def test_a_command_that_ends_its_watcher_is_no_fault_of_the_host(sandbox):
    ran = await shell(sandbox, "echo kept > f; kill -9 -1")
    assert (ran.end, ran.status) == ("exited", -9)
    assert await said(sandbox, "cat f") == "kept\n"
    ran = await shell(sandbox, "kill -STOP $PPID; sleep 60", timeout_s=0.3)
    assert ran.end == "time", "who stops its watcher has failed, as who is late"


async def test_memory_of_no_process_and_no_file_is_refused_and_the_limit_holds_while_commands_come(sandbox):
    calls = "os.memfd_create('x')", "sys.exit(ctypes.CDLL(None).shmget(0, 1 << 28, 0o1600) >= 0)"
    made = [
        await shell(sandbox, f'{sys.executable} -S -c "import ctypes, os, sys; {call}"') for call in calls
    ]
    assert [(b"not permitted" in one.stderr, one.status) for one in made] == [(True, 1), (False, 0)]
    hoard = f"{sys.executable} -S -c 'x = bytearray(150 << 20); import time; time.sleep(60)'"
    await said(sandbox, f"({hoard}; touch over) & ({hoard}; touch over) &")
    async with asyncio.timeout(30):
        while (await shell(sandbox, "pgrep -f bytearra[y]")).status == 0:
            pass


async def test_labels_and_records_of_runs_are_hidden_below_what_is_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(hidden, "_hidden", set())
    data = tmp_path / "data"
    (data / "runs").mkdir(parents=True)
    for name in ("labels.jsonl", "runs/record", "open"):
        (data / name).write_text(name)
    hidden.hide([data / "labels.jsonl", data / "runs"])
    async with sandbox_of(readable=(data,)) as sandbox:
        ran = await shell(sandbox, f"cd {data}; cat labels.jsonl open; ls -a runs; cat runs/record")
        assert (ran.stdout, b"record: Permission denied" in ran.stderr) == (b"open", True), ran
        assert (await shell(sandbox, f"umount {data}/runs {data}/labels.jsonl")).status != 0


async def test_a_cancelled_command_is_ended(sandbox):
    task = asyncio.create_task(shell(sandbox, "echo $$ > pid; exec sleep 300", timeout_s=300))
    while not (await shell(sandbox, "cat pid 2>/dev/null")).stdout:
        pass
    task.cancel()
    await asyncio.wait([task])
    async with asyncio.timeout(30):
        while (await shell(sandbox, "kill -0 $(cat pid)")).status == 0:
            pass


async def test_a_closed_sandbox_leaves_nothing_and_others_do_not_notice():
    backend = NamespaceBackend.from_config(NamespaceSandboxes())
    try:
        server = psutil.Process(backend._server.process.pid)
        other = EpisodeSandbox(await backend.start(None, SandboxLimits()))
        before = server.children(recursive=True)
        one = EpisodeSandbox(await backend.start(None, SandboxLimits()))
        await said(one, "setsid sleep 987 & echo mine > /tmp/f")
        listen = (
            "import socket; s = socket.create_server(('127.0.0.1', 5000)); print(1, flush=True); s.accept()"
        )
        connect = "import socket; socket.create_connection(('127.0.0.1', 5000), 5)"
        python = f"{sys.executable} -S -c"
        await said(one, f'{python} "{listen}" > begun & while [ ! -s begun ]; do :; done')
        assert (await shell(one, f'{python} "{connect}"')).status == 0
        assert b"ConnectionRefused" in (await shell(other, f'{python} "{connect}"')).stderr
        mine = {*server.children(recursive=True)}.difference(before)
        await one.close()
        assert len(mine) >= 3
        assert psutil.wait_procs(mine, timeout=30)[1] == []
        assert int(await said(other, "ls /tmp; echo $(ps -e | wc -l)")) <= 7
        with pytest.raises(ToolError, match="the sandbox failed"):
            await said(one, "true")
        os.kill(backend._server.process.pid, 9)
        with pytest.raises(ToolError, match="the sandbox failed"):  # its end ends all sandboxes
            await said(other, "sleep 20")
        await asyncio.to_thread(backend._server.process.wait, 10)
        again = EpisodeSandbox(await backend.start(None, SandboxLimits()))
        assert await said(again, "echo 1") == "1\n"
        with pytest.raises(ToolError, match="no image"):
            await backend.start("python:3.12", SandboxLimits())
    finally:
        await backend.close()


WAYS_OUT = {
    "network": "import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
    "abstract": "import socket; socket.socket(socket.AF_UNIX).connect('\\0{abstract}')",
    "vsock": "import socket; socket.socket(40, socket.SOCK_STREAM)",
    "raw": "import socket; socket.socket(17, socket.SOCK_RAW)",
    "host file": "open('{secret}').read()",
    "host shadow": "open('/etc/shadow').read()",
    "host home": "import os; assert os.listdir('/root') and open('/root/.bashrc').read()",
    "sys": "open('/sys/kernel/uevent_seqnum').read()",
    "write programs": "open('/usr/bin/x', 'w')",
    "signal": "import os; os.kill({pid}, 0)",
    "first process": "open('/proc/1/mem', 'rb')",
    "its descriptors": "import os; os.listdir('/proc/1/fd')",
    "namespaces": "import os; os.unshare(0x10000000) if hasattr(os, 'unshare') else "
    "__import__('ctypes').CDLL(None, use_errno=True).unshare(0x10000000) and 1 / 0",
    "mount": "import ctypes; ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, None) and 1 / 0",
    "root": "import os; os.setuid(0)",
    "kernel": "open('/proc/sysrq-trigger', 'w')",
    "core pattern": "open('/proc/sys/kernel/core_pattern', 'w')",
    "name": "import socket; socket.sethostname('x')",
    "device": "import os; os.mknod('/tmp/d', 0o60666, os.makedev(254, 0))",
    "environment": "import os; assert os.environ['SLUICE_SECRET']",
}


async def test_no_way_out_is_open(sandbox, tmp_path, monkeypatch):
    monkeypatch.setenv("SLUICE_SECRET", "1")
    (tmp_path / "secret").write_text("label")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"\0sluice-{os.getpid()}")
        unix.listen()
        given = {
            "port": server.getsockname()[1], "abstract": f"sluice-{os.getpid()}", "pid": os.getpid(),
            "secret": tmp_path / "secret",
        }  # fmt: skip
        words = {name: (sys.executable, "-S", "-c", code.format(**given)) for name, code in WAYS_OUT.items()}
        tried = await asyncio.gather(
            *(sandbox.run(Command(words=one, timeout_s=60, variables={})) for one in words.values())
        )
    open_ways = [
        name for name, ran in zip(words, tried, strict=True) if ran.end == "exited" and ran.status == 0
    ]
    assert open_ways == []
    assert all(b"Error" in ran.stderr for ran in tried)  # each was tried, and refused
    inside = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname())"
    )
    assert (await sandbox.run(Command(words=(sys.executable, "-S", "-c", inside), timeout_s=60))).status == 0


async def test_further_files_of_the_host_are_shown_read_only_if_named(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_text("1")
    (tmp_path / "beside").write_text("2")
    async with sandbox_of(readable=(tmp_path / "data",)) as sandbox:
        assert await said(sandbox, f"cat {tmp_path}/data/x; ls {tmp_path}") == "1data\n"
        assert (await shell(sandbox, f"rm {tmp_path}/data/x")).status != 0
    with pytest.raises(ConfigError, match="no such file"):
        NamespaceBackend.from_config(NamespaceSandboxes(readable=(Path("/nowhere"),)))


async def test_an_actor_without_privileges_has_sandboxes_too(monkeypatch):
    start_as_ordinary_user(monkeypatch)
    async with sandbox_of() as sandbox:
        assert await said(sandbox, "id -u; touch f; ls") == "1000\nf\n"
        assert int(await said(sandbox, "ps -e | wc -l")) <= 7


async def test_a_start_that_is_cancelled_leaves_nothing():
    backend = NamespaceBackend.from_config(NamespaceSandboxes())
    try:
        for steps in range(3):
            starts = [asyncio.create_task(backend.start(None, SandboxLimits())) for _ in range(4)]
            for _ in range(steps):
                await asyncio.sleep(0)
            for start in starts:
                start.cancel()
            for one in await asyncio.gather(*starts, return_exceptions=True):
                if isinstance(one, NamespaceSandbox):  # it was there before the cancellation
                    await one.close()
                else:
                    assert isinstance(one, asyncio.CancelledError)
        server = psutil.Process(backend._server.process.pid)
        assert psutil.wait_procs(server.children(recursive=True), timeout=30)[1] == []
    finally:
        await backend.close()
