"""A run whose shards are processes of their own, in directories of their own, one of them killed."""

import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from bus.server import free_port
from storage.store.replay import ReplayStore
from tests.e2e.commands import SMALL, Command

pytestmark = [pytest.mark.slow, pytest.mark.nats]
STEPS, GROUPS, SAMPLES = 8, 4, 4
RUN = "apart"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory):
    """The directories of a run that has ended; a shards process was killed on the way."""
    root = tmp_path_factory.mktemp("shards")
    port = free_port("127.0.0.1")
    join = ("--bus", f"nats://127.0.0.1:{port}", "--run", RUN)
    small = (*_without("--learner.steps", SMALL), "--learner.steps", str(STEPS), "--replay.shards", "4")
    started = [Command(root / "bus", "bus", "--port", str(port))]

    def start(host: str, command: str, *arguments: str) -> Command:
        started.append(Command(root / host, command, *join, *arguments))
        return started[-1]

    try:
        storage = start("storage", "storage", *small, "--replay.here", "none")
        first = start("first", "shards", "--shards", "0-1")
        second = start("second", "shards", "--shards", "2-3", "--directory", "elsewhere")
        learner, actors = start("learner", "learner"), start("actors", "actors")
        _until(lambda: _stored(root) >= 2 * GROUPS, learner)
        second.kill()
        again = start("second", "shards", "--shards", "2-3", "--directory", "elsewhere")
        _until(lambda: _stored(root) >= 4 * GROUPS, learner)
        assert start("thief", "shards", "--shards", "3").wait(60) == 2
        assert learner.wait(180) == 0, learner.said()
        assert actors.wait(30) == 0, actors.said()
        for service in (first, again, storage, started[0]):
            assert service.stop() == 0, service.said()
        yield root
    finally:
        for command in started:
            command.kill()


def _without(flag: str, arguments: tuple[str, ...]) -> tuple[str, ...]:
    at = arguments.index(flag)
    return arguments[:at] + arguments[at + 2 :]


def _stored(root: Path) -> int:
    """Groups that the ledger knows to be complete."""
    path = root / f"storage/runs/{RUN}/ledger.sqlite"
    if not path.exists():
        return 0
    with closing(sqlite3.connect(path, timeout=10)) as ledger:
        if not ledger.execute("SELECT 1 FROM sqlite_master WHERE name = 'leases'").fetchone():
            return 0
        question = "SELECT count(*) FROM leases WHERE state NOT IN ('issued', 'rejected')"
        return int(ledger.execute(question).fetchone()[0])


def _until(true, alive: Command, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert alive.process.poll() is None, alive.said()
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.1)


def test_nothing_is_lost_and_every_group_trained_on_once(finished: Path):
    progress = json.loads((finished / f"learner/runs/{RUN}/progress.json").read_text())
    assert progress["trajectories_trained"] == STEPS * GROUPS * SAMPLES
    with closing(sqlite3.connect(finished / f"storage/runs/{RUN}/ledger.sqlite")) as ledger:
        groups = dict(ledger.execute("SELECT state, count(*) FROM leases GROUP BY state"))
        known = {lease for (lease,) in ledger.execute("SELECT lease_id FROM leases WHERE state != 'issued'")}
        counts = {uses for (uses,) in ledger.execute("SELECT count(*) FROM uses GROUP BY lease_id")}
    assert groups.pop("committed") == STEPS * GROUPS
    assert set(groups) <= {"stored", "issued"}
    assert counts == {1}
    assert known <= set(_complete(finished))


def test_each_shard_lies_where_its_process_was_told_to(finished: Path):
    assert {p.name for p in (finished / f"first/runs/{RUN}/replay").iterdir()} == {"shard_00", "shard_01"}
    assert {p.name for p in (finished / f"second/elsewhere/{RUN}/replay").iterdir()} == {
        "shard_02",
        "shard_03",
    }
    assert not (finished / f"storage/runs/{RUN}/replay").exists()
    for lease_id, shard in _complete(finished).items():
        assert lease_id % 4 == shard


def test_second_writer_is_refused_with_the_first_ones_name(finished: Path):
    said = (finished / "thief/shards.out").read_text()
    assert f"launch: run '{RUN}' already has a shard-3: process " in said
    assert "Traceback" not in said


def _complete(root: Path) -> dict[int, int]:
    """Complete groups on disk, and in which shard."""
    found: dict[int, int] = {}
    for host in (f"first/runs/{RUN}", f"second/elsewhere/{RUN}"):
        for directory in (root / host / "replay").iterdir():
            with closing(ReplayStore.open(directory, writable=False)) as store:
                found |= dict.fromkeys(store.completed, int(directory.name[-2:]))
    return found
