"""A run whose engine is SGLang with a rank in each of two `launch actors`, of which each is lost once."""

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import tomli_w

from bus.server.nats_server import free_port
from tests.e2e.commands import SMALL, Command, wait_until, with_steps

pytestmark = [pytest.mark.sglang, pytest.mark.nats, pytest.mark.nightly, pytest.mark.timeout(2400)]
START_S = 900.0
RUN = "nodes"
STEPS = 100_000


class Run:
    """The processes of the run, each in a directory of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bus_url = f"nats://127.0.0.1:{free_port('127.0.0.1')}"
        self.port = free_port("127.0.0.1")
        engine = {
            "type": "sglang", "nodes": 2, "rendezvous": f"127.0.0.1:{self.port}", "server": {"tp_size": 2},
            "weights_directory": str(root / "weights"), "environment": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
        }  # fmt: skip
        (root / "run.toml").write_text(tomli_w.dumps({"actors": {"engine": engine}}))
        self.started: list[Command] = []
        bus = self.start("bus", "bus", "--port", self.bus_url.rpartition(":")[2])
        wait_until(lambda: "bus_ready" in bus.said(), "the bus", bus)
        self.storage = self.start(
            "storage", "storage", *self.joined, *with_steps(SMALL, STEPS),
            "--config", str(root / "run.toml"), "--learner.batch.no-skip-zero-advantages",
        )  # fmt: skip
        self.learner = self.start("learner", "learner", *self.joined)

    @property
    def joined(self) -> tuple[str, ...]:
        return ("--bus", self.bus_url, "--run", RUN)

    def start(self, host: str, *arguments: str) -> Command:
        self.started.append(Command(self.root / host, *arguments))
        return self.started[-1]

    def node(self, rank: int) -> Command:
        return self.start(
            f"node-{rank}",
            "actors",
            *self.joined,
            "--actors.engine.type",
            "sglang",
            "--actors.engine.node-rank",
            str(rank),
        )

    def rows(self) -> list[dict[str, float]]:
        path = self.root / "storage/runs" / RUN / "metrics.jsonl"
        return [*map(json.loads, path.read_text().splitlines())] if path.exists() else []

    def goes_on(self, *alive: Command) -> None:
        """Return when two further steps were trained."""
        steps = len([row for row in self.rows() if row.get("train/stage") == "rl"])
        wait_until(
            lambda: len([row for row in self.rows() if row.get("train/stage") == "rl"]) >= steps + 2,
            "two steps", *alive, timeout_s=START_S,
        )  # fmt: skip

    def shows(self, words: str) -> None:
        """Return when `launch status` says this."""

        def said() -> bool:
            asked = Command(self.root / "status", "status", *self.joined)
            asked.wait(60)
            return words in " ".join(asked.said().split())

        wait_until(said, words, timeout_s=START_S)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    try:
        yield made
    finally:
        for command in made.started:
            command.kill()


def ranks_of(node: Command) -> int:
    """The process group of the ranks that a node runs."""
    [launcher] = [
        one for one in psutil.Process(node.process.pid).children() if '"node_rank"' in " ".join(one.cmdline())
    ]
    return launcher.pid


def test_an_engine_begins_anew_whichever_node_is_lost(run: Run):
    head, other = run.node(0), run.node(1)
    run.goes_on(head, other, run.learner)

    os.killpg(ranks_of(other), signal.SIGKILL)
    wait_until(lambda: "engine_begins_anew" in head.said(), "node 0 to begin anew", head, other)
    assert "ended with signal SIGKILL" in head.said()
    run.goes_on(head, other, run.learner)

    other.kill()
    run.shows("waiting for node 1 of the engine at")
    other = run.node(1)
    run.goes_on(head, other, run.learner)

    head.kill()
    run.shows("waiting for node 0 of its engine")
    with socket.create_server(("127.0.0.1", run.port)):
        refused = run.node(0)
        assert refused.wait(START_S) == 1
    assert "node 0 cannot have this port" in refused.said()
    head = run.node(0)
    run.goes_on(head, other, run.learner)

    mismatches = [row["policy/mismatch_nats"] for row in run.rows() if "policy/mismatch_nats" in row]
    assert max(mismatches) < 1e-5, "both nodes had each version that an answer says it is of"
