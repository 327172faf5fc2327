"""A learner of two ranks on two hosts, stopped and started again; the run ends whole."""

import json
import sqlite3
from pathlib import Path

import pytest

from bus.server.nats_server import free_port
from tests.e2e.commands import SMALL, Command, wait_until, with_steps

pytestmark = [pytest.mark.nightly, pytest.mark.nats, pytest.mark.timeout(900)]


def test_two_nodes_stop_together_when_one_is_told_to_and_finish_when_started_again(tmp_path: Path):
    port, master = free_port("127.0.0.1"), f"127.0.0.1:{free_port('127.0.0.1')}"
    join = ("--bus", f"nats://127.0.0.1:{port}", "--run", "world")
    started = [Command(tmp_path / "bus", "bus", "--port", str(port))]
    shared = ("--directory", str(tmp_path / "shared"), "--nodes", "2", "--master", master)
    shared += ("--stopped-status", "75")

    def nodes(name: str) -> list[Command]:
        both = [
            Command(tmp_path / f"{name}-{n}", "learner", *join, *shared, "--node-rank", str(n))
            for n in (1, 0)
        ]
        started.extend(both)
        return both

    try:
        started.append(Command(tmp_path / "storage", "storage", *join, *with_steps(SMALL, 8)))
        started.append(Command(tmp_path / "actors", "actors", *join))
        first = nodes("first")
        progress = tmp_path / "shared/world/progress.json"
        wait_until(progress.exists, str(progress), *first, timeout_s=300)
        assert [node.stop(120) if n == 0 else node.wait(120) for n, node in enumerate(first)] == [75, 75], [
            node.said() for node in first
        ]
        assert json.loads(progress.read_text())["stage"] != "done"
        for node in nodes("second"):
            assert node.wait(400) == 0, node.said()
    finally:
        for command in started:
            command.kill()
    done = json.loads(progress.read_text())
    assert (done["stage"], done["step"]) == ("done", 8)
    assert done["trajectories_trained"] == 8 * 4 * 4
    ledger = sqlite3.connect(tmp_path / "storage/runs/world/ledger.sqlite")
    groups = dict(ledger.execute("SELECT state, count(*) FROM leases GROUP BY state"))
    ledger.close()
    assert groups["committed"] == 8 * 4
