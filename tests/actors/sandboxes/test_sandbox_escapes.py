"""What programs try in order to get out of the sandbox, started by root and by an ordinary user."""

import asyncio
from pathlib import Path

import psutil
import pytest

from actors.sandboxes.limits import Limits
from actors.sandboxes.sandbox import Sandbox
from tests.actors.sandboxes.sandboxes import start_as_ordinary_user

SECRET = "the-password-of-the-bus"
LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
CALL = (
    LIBC
    + "if libc.{} >= 0: print('ESCAPED')\n"
    + "raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))"
)


@pytest.fixture(
    scope="module", params=["as started", pytest.param("as ordinary user", marks=pytest.mark.slow)]
)
def sandbox(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLUICE_BUS", SECRET)
        if request.param == "as ordinary user":
            start_as_ordinary_user(patch)
        sandbox = Sandbox(Limits(processes=8, wall_s=5, files=32), at_once=4)
        yield sandbox
        asyncio.run(sandbox.close())


REFUSED = {
    "the host's users": ("open('/etc/passwd')", "FileNotFoundError"),
    "the host's processes": ("open('/proc/1/environ')", "FileNotFoundError"),
    "the actor's environment": ("open('/proc/self/environ')", "FileNotFoundError"),
    "the kernel's settings": ("open('/sys/kernel/uevent_seqnum')", "FileNotFoundError"),
    "a disk": ("open('/dev/vda')", "FileNotFoundError"),
    "up and out of the directory": ("open('../../../../etc/passwd')", "FileNotFoundError"),
    "a link to a file outside": (
        "import os\nos.symlink('/etc/passwd', 'link')\nopen('link')",
        "FileNotFoundError",
    ),
    "a link to write through": ("import os\nos.symlink(os.__file__, 'link')\nopen('link', 'a')", "Error"),
    "a file in the root": ("open('/file', 'w')", "OSError"),
    "Python's own files": ("import os\nopen(os.__file__, 'w')", "OSError"),
    "a device": (
        "import os, stat\nos.mknod('d', stat.S_IFBLK | 0o600, os.makedev(254, 0))",
        "PermissionError",
    ),
    "the network": ("import socket\nsocket.create_connection(('127.0.0.1', 4222))", "PermissionError"),
    "a Unix socket": ("import socket\nsocket.socket(socket.AF_UNIX)", "PermissionError"),
    "a raw socket": ("import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW)", "PermissionError"),
    "to be root": ("import os\nos.setuid(0)", "OSError"),
    "the group of root": ("import os\nos.setgroups([0])", "PermissionError"),
    "another program": ("import os\nos.execv('/bin/sh', ['sh'])", "Error"),
    "its interpreter again": ("import subprocess, sys\nsubprocess.run([sys.executable])", "Error"),
    "a larger limit": (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
        "ValueError",
    ),
    "10 GB of memory": ("bytearray(10 * 10**9)", "MemoryError"),
    "10 GB of shared memory": ("import mmap\nmmap.mmap(-1, 10 * 10**9)", "OSError"),
    "a file of 1 GB": ("open('f', 'wb').truncate(10**9)", "OSError"),
    "files of 160 MB together": (
        "for n in range(10):\n  open(str(n), 'wb').write(bytes(1 << 24))",
        "No space left",
    ),
    "many files": ("for n in range(1000):\n  open(str(n), 'w').close()", "No space left"),
    "many descriptors": ("held = [open('/dev/null') for n in range(1000)]", "Too many open files"),
    "to trace itself": (CALL.format("ptrace(0, 0, 0, 0)"), "PermissionError"),
    "to trace another process": (CALL.format("ptrace(16, 1, 0, 0)"), "PermissionError"),
    "another's memory": (CALL.format("process_vm_readv(1, None, 0, None, 0, 0)"), "PermissionError"),
    "users of its own": (CALL.format("unshare(0x10000000)"), "PermissionError"),
    "namespaces for a child": (
        CALL.format("syscall({'x86_64': 56, 'aarch64': 220}[os.uname().machine], 0x10000011, 0, 0, 0, 0)"),
        "PermissionError",
    ),
    "a mount": (CALL.format("mount(b'none', b'/tmp', b'tmpfs', 0, None)"), "PermissionError"),
    "another root": (CALL.format("chroot(b'/tmp')"), "PermissionError"),
    "files in memory": ("import os\nos.memfd_create('x')", "PermissionError"),
    "io_uring": (CALL.format("syscall(425, 1, 0)"), "PermissionError"),
    "a system call of the future": (CALL.format("syscall(5000)"), "Function not implemented"),
    "the numbers of another architecture": (CALL.format("syscall(0x40000000 + 39)"), "not implemented"),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_it_is_refused(sandbox, what):
    code, said = REFUSED[what]
    ran = await sandbox.run(code)
    assert said in ran.stderr
    assert (ran.status, "ESCAPED" in ran.stdout) == (1, False)


@pytest.fixture
def run_directory(tmp_path):
    (tmp_path / "config.json").write_text(SECRET)
    tmp_path.chmod(0o777)
    return tmp_path


async def test_the_runs_files_are_not_there(sandbox, run_directory: Path):
    ran = await sandbox.run(f"open({str(run_directory / 'config.json')!r})")
    assert "FileNotFoundError" in ran.stderr
    ran = await sandbox.run("import os\nprint(*os.listdir('/'), os.listdir('/tmp'))")
    assert not {"etc", "proc", "home", "work", "sys", "var"} & {*ran.stdout.split()}
    assert ran.stdout.endswith(" []\n")
    path = str(run_directory / "escaped")
    await sandbox.run(f"import os\nos.makedirs(os.path.dirname({path!r}))\nopen({path!r}, 'w')")
    assert [found.name for found in run_directory.iterdir()] == ["config.json"]  # noqa: ASYNC240  # a test


async def test_the_environment_holds_nothing_of_the_actors(sandbox):
    ran = await sandbox.run("import os\nprint(dict(os.environ), os.environb)")
    assert "HOME" in ran.stdout
    assert SECRET not in ran.stdout
    # nor does that of the process which every program is forked from
    assert SECRET not in psutil.Process(sandbox._server.process.pid).environ().values()


async def test_no_descriptor_is_open_but_its_streams(sandbox):
    code = (
        "import os\nopen_ones = []\nfor n in range(4096):\n"
        "  try: os.fstat(n)\n  except OSError: continue\n  open_ones.append(n)\nprint(open_ones)"
    )
    assert (await sandbox.run(code)).stdout == "[0, 1, 2]\n"


async def test_it_has_no_privilege_and_cannot_get_one(sandbox):
    code = (
        LIBC + "data = (ctypes.c_uint32 * 6)()\n"
        "libc.capget(ctypes.byref((ctypes.c_uint32 * 2)(0x20080522, 0)), ctypes.byref(data))\n"
        "print(os.getuid() != 0, list(data), libc.prctl(39, 0, 0, 0, 0), libc.prctl(21, 0, 0, 0, 0))"
    )
    assert (await sandbox.run(code)).stdout == "True [0, 0, 0, 0, 0, 0] 1 2\n"


async def test_a_fork_bomb_has_so_many_processes_and_ends(sandbox):
    code = (
        "import os, time\nforked = 0\ntry:\n  while True:\n"
        "    if os.fork() == 0: time.sleep(60)\n    forked += 1\n"
        "except OSError as error:\n  print(forked, error)"
    )
    assert (await sandbox.run(code)).stdout == "7 [Errno 11] Resource temporarily unavailable\n"
    both = await asyncio.gather(
        sandbox.run("import os, sys\nwhile True:\n  try: os.fork()\n  except OSError: sys.exit()"),
        sandbox.run("import os\nprint(os.getpid())"),
    )
    assert both[1].stdout == "1\n"  # a bomb beside it takes nothing of its processes


@pytest.mark.parametrize("target", ["os.getppid()", "0", "-1", "os.getpid()", "2"])
async def test_it_can_end_no_process_but_its_own(sandbox, target):
    neighbour = asyncio.create_task(sandbox.run("import time\ntime.sleep(0.3)\nprint('alive')"))
    server = sandbox._server.process
    await sandbox.run(f"import os, signal\nos.kill({target}, signal.SIGKILL)")
    assert (await neighbour).stdout == "alive\n"
    assert server.poll() is None
