"""A run on a secured bus, each of whose processes has the credentials of its own role."""

import json
from pathlib import Path

import pytest

from bus.credentials import load_credentials
from bus.server import free_port
from tests.e2e.commands import SMALL, Command, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.nats, pytest.mark.timeout(300)]


def test_run_is_trained_with_a_role_for_each_process(tmp_path: Path):
    port = free_port("127.0.0.1")
    keys = tmp_path / "keys"
    arguments = ("--port", str(port), "--secure", str(keys), "--run", "secured")
    started = [Command(tmp_path / "bus", "bus", *arguments)]

    def start(command: str, role: str, *arguments: str) -> Command:
        creds = str(keys / f"secured/{role}.creds")
        started.append(Command(tmp_path / role, command, "--creds", creds, "--run", "secured", *arguments))
        return started[-1]

    try:
        wait_until(lambda: "bus_ready" in started[0].said(), "the bus", started[0])
        storage = start("storage", "storage", *SMALL)
        learner, actors = start("learner", "learner"), start("actors", "actor")
        assert learner.wait(200) == 0, learner.said()
        assert actors.wait(30) == 0, actors.said()
        assert storage.stop() == 0, storage.said()
        said = [command.said() for command in started]
        assert not [text for text in said if "permissions violation" in text.lower()], said
        progress = json.loads((tmp_path / "learner/runs/secured/progress.json").read_text())
        assert progress["step"] == 4
        seeds = [load_credentials(path).seed for path in keys.glob("secured/*.creds")]
        written = [path for path in tmp_path.rglob("*") if path.is_file() and keys not in path.parents]
        leaks = [path for path in written if any(seed.encode() in path.read_bytes() for seed in seeds)]
        assert leaks == []
    finally:
        for command in started:
            command.kill()
