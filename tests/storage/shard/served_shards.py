"""Shards that are served."""

from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

from storage.disk.run_directory import RunDirectory
from storage.dispatch.dispatcher import Dispatcher
from storage.ledger.ledger import Ledger
from storage.prompts.data_sets import DataSets
from storage.settings.replay import ReplayConfig
from storage.shard.service import ShardsSettings, run_shards
from tests.storage.serving import PROMPTS, SHARDS, SMALL, running


@contextmanager
def opened(bus, directory: Path):
    """The dispatcher of a storage process that keeps no shard, not yet running."""
    with closing(Ledger.open(directory / "ledger.sqlite")) as ledger:
        data = DataSets(ledger, directory)
        data.configure(PROMPTS, seed=0, shuffle=True, source="the test")
        dispatcher = Dispatcher(bus, ledger, data, SMALL, shards=SHARDS, seed=0)
        dispatcher.admit()
        yield dispatcher


@asynccontextmanager
async def dispatching(bus, directory: Path):
    """Such a process, from start to stop."""
    with opened(bus, directory) as dispatcher:
        async with running(lambda stop: dispatcher.run(stop, reissue=False)):
            yield dispatcher


def settings(directory: Path, *numbers: int) -> ShardsSettings:
    return ShardsSettings(numbers, ReplayConfig(shards=SHARDS, linger_s=0.0), RunDirectory(directory, "test"))


def keeping(bus, directory: Path, *numbers: int):
    """`launch shards`, in this process."""
    return running(lambda stop: run_shards(bus, settings(directory, *numbers), stop))
