"""What the storage process sets for itself, and takes back."""

import gc
import sys

import pytest

from bus.process.process_tuning import (
    COLLECT_EVERY,
    SWITCH_INTERVAL_S,
    few_collections,
    no_collections,
    paced,
)
from storage.disk.run_directory import RunDirectory
from storage.settings.replay import ReplayConfig
from storage.shard.service import hold_shards


@pytest.mark.usefixtures("unfrozen")
def test_inside_threads_take_turns_sooner_and_collections_are_rarer():
    interval, thresholds, frozen = sys.getswitchinterval(), gc.get_threshold(), gc.get_freeze_count()
    with paced():
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
        assert gc.get_threshold()[0] == COLLECT_EVERY
        assert gc.get_freeze_count() > frozen
    assert sys.getswitchinterval() == interval
    assert gc.get_threshold() == thresholds
    assert gc.get_freeze_count() == 0


@pytest.mark.slow
@pytest.mark.usefixtures("unfrozen")
def test_who_goes_in_last_may_come_out_last():
    thresholds = gc.get_threshold()
    first, second = few_collections(), paced()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold()[0] == COLLECT_EVERY
    assert gc.get_freeze_count() > 0
    second.__exit__(None, None, None)
    assert gc.get_threshold() == thresholds
    assert gc.get_freeze_count() == 0


def test_nothing_is_collected_while_libraries_are_loaded_and_all_is_as_before_then():
    with no_collections():
        assert not gc.isenabled()
        with no_collections():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.nats
async def test_whoever_holds_shards_is_paced(bus, tmp_path):
    async with hold_shards(bus, RunDirectory(tmp_path, "test"), ReplayConfig(), [0]):
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
