"""A ledger brought back from before what its shards have settled ends the run: no restart mends it."""

import asyncio
import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from bus.connection import Bus
from bus.errors import LostDataError
from launch.process.runtime import LOST_DATA, fail
from storage.service import run_storage
from storage.shard.service import run_shards
from storage.store import retention
from storage.store.settled import Settled, load_settled, refuse_older_ledger
from tests.storage.served_storage import make_settings
from tests.storage.serving import LearnerStandIn, has, send_groups, send_rejections, until
from tests.storage.shard.served_shards import dispatching, keeping, opened, settings

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick", "quick_roles")]
WHEN = {
    "no lease": "has issued 0 leases, and had issued 4",
    "no group": "has seen 0 complete groups of this shard, and had seen 1",
    "no rejection": "lease 3 is rolling out by what it says, and was settled",
}
"""What the ledger that comes back did not know yet, and what is said of it."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards let settled groups go at once."""
    monkeypatch.setattr(retention, "PERIOD_S", 0.05)
    monkeypatch.setattr(retention, "ROWS_IN_MEMORY", 0)


def noted(directory: Path, shard: int) -> Settled:
    return load_settled(settings(directory).run.replay(shard))


def copy_of(ledger: Path, name: str) -> None:
    with closing(sqlite3.connect(ledger)) as now, closing(sqlite3.connect(ledger.with_name(name))) as then:
        now.backup(then)


@asynccontextmanager
async def settled_groups(bus: Bus, directory: Path) -> AsyncIterator[None]:
    """Both shards, which have let go of leases 0 and 1 that a step holds, and of 3, which was rejected.

    There is no dispatcher any more, but copies of its ledger as it was meanwhile, named by what they lack."""
    learner, ledger = LearnerStandIn(bus), directory / "ledger.sqlite"
    async with keeping(bus, directory, 0, 1):
        async with dispatching(bus, directory) as dispatcher:
            dispatcher.ledger.flush()
            copy_of(ledger, "no lease")
            await learner.publish(0)
            await has(bus, "TASKS", 4)
            copy_of(ledger, "no group")
            await send_groups(bus, [0, 1])
            await until(lambda: len(dispatcher.ledger.stored) == 2)
            dispatcher.ledger.flush()
            copy_of(ledger, "no rejection")
            await learner.publish(0, stage="done")
            await until(lambda: dispatcher.room() == 0)  # nothing is issued in place of lease 3
            await send_rejections(bus, [3])
            await until(lambda: dispatcher.ledger.account().rejected == 1)
            await learner.batch(1)
            await learner.commit(1)
            await until(lambda: all(noted(directory, n).forgotten == 1 for n in (0, 1)))
            await until(lambda: noted(directory, 1).covers(3) and noted(directory, 0).through == 4)
        yield


def bring_back(ledger: Path, name: str) -> None:
    for file in ledger.parent.glob(f"{ledger.name}*"):
        file.unlink()
    shutil.copy(ledger.with_name(name), ledger)


def one_in_every_run(number: int) -> list[object]:
    """Return the ways in which a ledger is older; the others than this one are tested with the slow tests."""
    return [pytest.param(name, marks=() if n == number else pytest.mark.slow) for n, name in enumerate(WHEN)]


def said(name: str, ledger: str, shard: str) -> str:
    return rf"{ledger} is older than what .*{shard}/\.settled notes of it: .*{WHEN[name]}\. Restore the newer"


@pytest.mark.parametrize("name", one_in_every_run(0))
async def test_dispatcher_ends_when_shards_have_settled_more_than_its_ledger_knows(
    bus: Bus, tmp_path: Path, name: str
):
    async with settled_groups(bus, tmp_path):
        bring_back(tmp_path / "ledger.sqlite", name)
        with opened(bus, tmp_path) as dispatcher, pytest.raises(ExceptionGroup) as failure:
            async with asyncio.timeout(60):
                await dispatcher.run(asyncio.Event(), reissue=False)
    assert failure.group_contains(LostDataError, match=said(name, r"ledger\.sqlite", r"shard_0\d"))


@pytest.mark.parametrize("name", one_in_every_run(1))
async def test_shard_that_starts_beside_an_older_ledger_ends(bus: Bus, tmp_path: Path, name: str):
    async with settled_groups(bus, tmp_path):
        pass
    bring_back(tmp_path / "ledger.sqlite", name)
    async with dispatching(bus, tmp_path):
        with pytest.raises(ExceptionGroup) as failure:
            await run_shards(bus, settings(tmp_path, 1), asyncio.Event())
    assert failure.group_contains(LostDataError, match=said(name, "the dispatcher's ledger", "shard_01"))


@pytest.mark.parametrize("name", one_in_every_run(2))
async def test_storage_with_its_shards_does_not_start_on_an_older_ledger(bus: Bus, tmp_path: Path, name: str):
    async with settled_groups(bus, tmp_path):
        pass
    of_all = make_settings(tmp_path, "sort 21")
    shutil.copytree(settings(tmp_path).run.path, of_all.run.path, dirs_exist_ok=True)
    shutil.copy(tmp_path / name, of_all.run.ledger)
    await bus.delete("role.dispatcher")
    with pytest.raises(LostDataError, match=said(name, r"ledger\.sqlite", r"shard_0\d")):
        await run_storage(bus, of_all, asyncio.Event())


async def test_the_same_ledger_goes_on(bus: Bus, tmp_path: Path):
    async with settled_groups(bus, tmp_path), dispatching(bus, tmp_path) as dispatcher:
        await until(lambda: not dispatcher.awaited_shards)
        assert set(dispatcher.ledger.rolling_out) == {2}


def test_an_older_ledger_has_the_exit_status_of_what_no_restart_mends():
    with pytest.raises(LostDataError) as failure:
        refuse_older_ledger("a", "b", Settled(through=2), issued=1, seen=0, again=())
    with pytest.raises(SystemExit) as ended:
        fail(failure.value)
    assert ended.value.code == LOST_DATA
