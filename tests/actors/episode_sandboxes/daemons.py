"""Daemons of containers that tests start, and images that are made of programs of this host."""

import io
import os
import pwd
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from actors.episode_sandboxes.containers import ContainerBackend

IMAGE = "tiny:1"
ROOTLESS = "podman of an ordinary user"
DAEMONS = {
    "docker": "dockerd --data-root {d}/data --exec-root {d}/exec --pidfile {d}/pid -H unix://{d}/socket "
    "--iptables=false --ip6tables=false --bridge=none",
    "podman": "podman --root {d}/data --runroot {d}/run --cgroup-manager cgroupfs --runtime runc "
    "system service --time 0 unix://{d}/socket",
    ROOTLESS: "podman --root {d}/data --runroot {d}/run --cgroup-manager cgroupfs --runtime runc "
    "--storage-driver vfs --events-backend file system service --time 0 unix://{d}/socket",
}
IMPORT = {
    "docker": "docker -H unix://{d}/socket import - " + IMAGE,
    "podman": "podman --root {d}/data --runroot {d}/run import - " + IMAGE,
    ROOTLESS: "podman --root {d}/data --runroot {d}/run --storage-driver vfs import - " + IMAGE,
}


def image_of_busybox():
    """A tar archive of one program that is all others."""
    applets = subprocess.run(["busybox", "--list"], check=True, capture_output=True, text=True).stdout.split()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(shutil.which("busybox"), "bin/busybox")
        for applet in set(applets) - {"busybox"}:
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
        tmp = tarfile.TarInfo("tmp")
        tmp.type, tmp.mode = tarfile.DIRTYPE, 0o1777
        archive.addfile(tmp)
    return packed.getvalue()


def image_of_python():
    """A tar archive of this Python's own, and of the libraries that it loads, besides busybox."""
    python, lib = Path(sys.base_prefix, "bin/python3").resolve(), Path(sysconfig.get_path("stdlib"))
    loads = subprocess.run(
        ["ldd", python, *lib.glob("lib-dynload/*.so")], check=True, capture_output=True, text=True
    ).stdout
    left_out = {"site-packages", "test", "__pycache__", "idlelib", "ensurepip"}
    packed = io.BytesIO(image_of_busybox())
    with tarfile.open(fileobj=packed, mode="a") as archive:
        for path in {python, *(Path(word) for word in loads.split() if word[0] == "/" and word[-1] != ":")}:
            archive.add(path.resolve(), str(path))
        archive.add(lib, str(lib), filter=lambda one: None if Path(one.name).name in left_out else one)
        link = tarfile.TarInfo("bin/python3")
        link.type, link.linkname = tarfile.SYMTYPE, str(python)
        archive.addfile(link)
    return packed.getvalue()


def account_of_many_users():
    """An account whose containers may have users of their own."""
    for line in Path("/etc/subuid").read_text().splitlines() if Path("/etc/subuid").exists() else ():
        with suppress(KeyError):
            return pwd.getpwnam(line.partition(":")[0])
    pytest.skip("needs an account with users for its containers: adduser NAME")


@contextmanager
def daemon_of(kind, archive=None):
    """The socket of a daemon that has an image of busybox, or of another archive."""
    name, before = DAEMONS[kind].split()[0], []
    account = account_of_many_users() if kind == ROOTLESS else None
    if os.geteuid() or not (shutil.which(name) and shutil.which("busybox")):
        pytest.skip(f"needs root, {name} and busybox: apt-get install docker.io podman crun busybox-static")
    with tempfile.TemporaryDirectory(prefix="sluice-daemon-", ignore_cleanup_errors=True) as directory:
        if account is not None:
            os.chown(directory, account.pw_uid, account.pw_gid)
            variables = [f"HOME={directory}", f"XDG_RUNTIME_DIR={directory}", f"PATH={os.environ['PATH']}"]
            user = [f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--init-groups"]
            before = ["setpriv", *user, "env", "-i", *variables]
        with started_daemon(kind, directory, before):
            load = [*before, *IMPORT[kind].format(d=directory).split()]
            subprocess.run(load, input=archive or image_of_busybox(), check=True, capture_output=True)
            yield Path(directory, "socket")


@contextmanager
def started_daemon(kind, directory, before=()):
    """A daemon that keeps what it has in a directory, also for the next one."""
    with Path(directory, "log").open("wb") as log:
        command = [*before, *DAEMONS[kind].format(d=directory).split()]
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=directory, start_new_session=True)
    try:
        until = time.monotonic() + 60
        while not Path(directory, "socket").is_socket():
            if process.poll() is not None or time.monotonic() > until:
                pytest.skip(f"{kind} does not run here: {Path(directory, 'log').read_text()[-500:]}")
            time.sleep(0.1)
        yield
    finally:
        with suppress(ProcessLookupError):  # it may have been stopped
            os.killpg(process.pid, signal.SIGTERM)  # an ordinary user's consists of several
        process.wait(60)
        with suppress(FileNotFoundError):  # and of one that keeps its namespace
            os.kill(int(Path(directory, "libpod/tmp/pause.pid").read_text()), signal.SIGKILL)


def ask_for_few_processes(patch):
    """Have limits that root may set who lacks CAP_SYS_RESOURCE: Podman's own default is above them."""
    described = ContainerBackend._described

    def within(self, *given):
        body = described(self, *given)
        body["HostConfig"]["Ulimits"].append({"Name": "nproc", "Soft": 4096, "Hard": 4096})
        return body

    patch(ContainerBackend, "_described", within)
