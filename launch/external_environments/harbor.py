"""Directories of Harbor's tasks as environments: `--environment harbor:PATH`. Each episode has a sandbox of
its task's image, in which the policy has a shell. What it leaves in the task's directory is brought into a
new sandbox of that image, where the tests judge it."""

import http.client
import io
import json
import re
import socket
import tarfile
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from bus.errors import ConfigError
from launch.external_environments.environment import ExternalEnvironment, digest_of
from launch.external_environments.harbor_tasks import WORKSPACE, HarborTask, files_below, read_tasks
from launch.recipes.recipe import user_cache
from launch.settings.run_config import Layer

SOCKET = Path("/var/run/docker.sock")
BUILD_TIMEOUT_S = 3600.0
HELDOUT_EVERY = 10
USUAL_MB, USUAL_S = 1024, 600.0
LINKS = {"/tests": "/tmp/tests", "/logs": "/tmp/logs"}
"""Places of the tests and of what they write, where no image has them."""
JUDGE = """
read -r proof
mkdir -p /tmp/tests /tmp/logs /logs/verifier /logs/agent /logs/artifacts
rm -f /logs/verifier/reward.*
. /tests/.variables
chmod +x /tests/test.sh
(cd WORKSPACE && /tests/test.sh) < /dev/null > /logs/verifier/test-stdout.txt 2>&1
if [ -s /logs/verifier/reward.json ]; then
  tr -d ' \\n' < /logs/verifier/reward.json | sed 's/.*"reward"://; s/[,}].*//' > /logs/verifier/reward.txt
fi
reward=$(cat /logs/verifier/reward.txt) && [ -n "$reward" ] || exit 1
echo "$proof $reward"
""".replace("WORKSPACE", WORKSPACE)
LAST_LINES = (
    'RUN if [ "$(pwd)" = / ]; then mkdir -p WORKSPACE; else rm -rf WORKSPACE; ln -s "$(pwd)" WORKSPACE; fi\n'
)
"""End of each Dockerfile: sandboxes work in the workspace, and tasks in a directory of theirs."""


class HarborEnvironment(ExternalEnvironment):
    """A directory of tasks."""

    @property
    def settings(self) -> Layer:
        """Return the run's settings; what they name is there after `prepare`."""
        # All sandboxes have the same limits, those of the task that needs most.
        tool: dict[str, Any] = {
            "type": "sandbox",
            "offers": ["shell", "files"],
            "backend": self._backend,
            "check": JUDGE,
            "command_s": max(
                float(task.setting("verifier", "timeout_sec") or USUAL_S) for task in self._tasks
            ),
            "memory_mb": max(task.megabytes("memory") or USUAL_MB for task in self._tasks),
            "disk_mb": max(task.megabytes("storage") or USUAL_MB for task in self._tasks),
        }
        environment = {"type": "tools", "max_turns": 50, "reward": "sandbox_check", "tools": [tool]}
        return {"data": self._files, "actors": {"environment": environment}}

    def prepare(self) -> None:
        """Write the prompts, and build images where sandboxes are containers. Raises `ConfigError`."""
        from storage.disk.atomic_files import write_file  # not for help

        if self._socket is not None:
            for task in self._tasks:
                _build(self._socket, task, _image_of(task))
        for name, rows in self._prompts.items():
            path = self._files[name]
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, "".join(json.dumps(row) + "\n" for row in rows).encode())

    @cached_property
    def _tasks(self) -> list[HarborTask]:
        return read_tasks(Path(self.name).expanduser().absolute())

    @property
    def _socket(self) -> Path | None:
        """Return where the daemon listens; None where there is none."""
        if unknown := [name for name in self.file.settings if name != "socket"]:
            raise ConfigError(
                f"{self.file.source}: no setting {unknown[0]!r}: there is `socket`, of a daemon alone"
            )
        named = self.file.settings.get("socket")
        return Path(str(named)) if named else SOCKET if SOCKET.is_socket() else None

    @property
    def _backend(self) -> dict[str, Any]:
        if self._socket is not None:
            return {"type": "docker", "image": _image_of(self._tasks[0]), "socket": str(self._socket)}
        places = {task.files_of_host()[0]: WORKSPACE for task in self._tasks}
        return {"type": "namespaces", "links": {**places, **LINKS}}

    @cached_property
    def _prompts(self) -> Mapping[str, list[Mapping[str, Any]]]:
        """Return prompts to train on, and every tenth task as a held-out one."""
        rows = [self._row(task) for task in self._tasks]
        heldout = rows[::HELDOUT_EVERY][: self.file.heldout]
        training = [row for row in rows if row not in heldout] or rows
        return {"prompts": training[: self.file.prompts], "heldout": heldout}

    @property
    def _files(self) -> dict[str, Path]:
        place = user_cache() / "sluice" / "environments" / f"harbor-{digest_of(self._prompts)}"
        return {name: place / f"{name}.jsonl" for name in ("prompts", "heldout")}

    def _row(self, task: HarborTask) -> Mapping[str, Any]:
        metadata: dict[str, Any] = {"task": task.name, "sandbox_check_files": task.hidden_files}
        if self._socket is not None:
            metadata["sandbox_image"] = _image_of(task)
        else:
            metadata["sandbox_files"] = task.files_of_host()[1]
        return {"prompt": task.instruction, "label": "", "metadata": metadata}


def _image_of(task: HarborTask) -> str:
    """Return the name of a task's image, which changes with its files."""
    files = files_below(task.directory / "environment")
    told = [task.dockerfile, *((str(path), path.stat().st_size, path.stat().st_mtime) for path in files)]
    return f"sluice-harbor:{digest_of(told)}"


def _build(daemon: Path, task: HarborTask, image: str) -> None:
    """Build a task's image, unless the daemon has it. Raises `ConfigError`."""
    from bus.process.work_progress import long_work  # not for help

    try:
        if _asked(daemon, "GET", f"/images/{quote(image)}/json")[0] == 200:
            return
        with long_work(f"building the image of {task.name}"):
            path = "/build?" + urlencode({"t": image, "dockerfile": "Dockerfile.sluice", "rm": 1})
            status, said = _asked(daemon, "POST", path, _context(task))
    except (OSError, http.client.HTTPException) as error:
        raise ConfigError(f"the daemon at {daemon} builds no image of {task.name}: {error!r}") from error
    failures = [line["error"] for line in _lines(said) if "error" in line]
    if status != 200 or failures:
        raise ConfigError(f"the image of {task.directory} cannot be built: {failures or said[-500:]!r}")


def _context(task: HarborTask) -> bytes:
    packed, place = io.BytesIO(), task.directory / "environment"
    users = re.findall(r"^\s*USER\s+(\S+)", task.dockerfile, re.MULTILINE | re.IGNORECASE)
    last = f"USER 0\n{LAST_LINES.replace('WORKSPACE', WORKSPACE)}" + (f"USER {users[-1]}\n" if users else "")
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path in files_below(place):
            archive.add(path, str(path.relative_to(place)))
        written = tarfile.TarInfo("Dockerfile.sluice")
        data = (task.dockerfile + last).encode()
        written.size = len(data)
        archive.addfile(written, io.BytesIO(data))
    return packed.getvalue()


def _lines(said: bytes) -> Iterator[Mapping[str, Any]]:
    for line in said.splitlines():
        if line.startswith(b"{"):
            yield json.loads(line)


def _asked(daemon: Path, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    """Ask the daemon at a socket; return the status and what it says. Raises OSError, HTTPException."""
    connection = http.client.HTTPConnection("daemon", timeout=BUILD_TIMEOUT_S)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(BUILD_TIMEOUT_S)
    try:
        connection.sock.connect(str(daemon))
        connection.request(method, f"/v1.41{path}", body, {"Content-Type": "application/x-tar"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()
