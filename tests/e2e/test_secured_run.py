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
        watching = start("watch", "watcher")
        learner, actors = start("learner", "learner"), start("actors", "actor")
        assert learner.wait(200) == 0, learner.said()
        assert actors.wait(30) == 0, actors.said()
        assert watching.wait(30) == 0, watching.said()
        assert "done, step 4 of 4" in watching.said()
        run = tmp_path / "storage/runs/secured"
        wait_until(lambda: (run / "summary.json").exists(), "the summary", storage)
        assert storage.stop() == 0, storage.said()
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if row.get("train/stage") == "rl"] == [1, 2, 3, 4]
        assert len({row["event"] for row in rows}) == len(rows)
        assert any(row["kind"] == "evaluation" for row in rows)
        assert "engine/busy_s" in (run / "counters.jsonl").read_text()
        assert json.loads((run / "summary.json").read_text())["steps"] == 4
        assert (run / "curves.png").exists()
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
