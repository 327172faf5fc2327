"""Which prompt each lease is for, when the data set changes while a run goes on."""

from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.errors import ConfigError, StorageError
from bus.messages import Prompt
from storage.ledger.ledger import Ledger
from storage.prompt_files.dataset import load_prompts
from storage.prompt_files.stored_prompts import store_prompts
from storage.prompts.data_sets import DataSets
from storage.prompts.order import DataSet, DataSetOrder, PromptOrder
from storage.settings.data import PromptKeys

OLD = [Prompt(content=f"old {n}", label=str(n)) for n in range(5)]
NEW = [Prompt(content=f"new {n}") for n in range(3)]
MORE = [Prompt(content=f"more {n}") for n in range(4)]


@contextmanager
def process(directory: Path, prompts=OLD, *, seed: int = 7, shuffle: bool = True):
    """A storage process whose configured prompts are these; what it did is durable when it ends."""
    with closing(Ledger.open(directory / "ledger.sqlite")) as ledger:
        data = DataSets(ledger, directory)
        data.configure(prompts, seed=seed, shuffle=shuffle, source="the file")
        yield ledger, data


def issued_for(data: DataSets, first: int, count: int) -> list[Prompt]:
    return [data.prompt(n) for n in range(first, first + count)]


def epochs(prompts, count: int, *, seed: int = 7) -> list[Prompt]:
    order = PromptOrder(len(prompts), seed, shuffle=True)
    return [prompts[order.index(n)] for n in range(count)]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_each_data_set_has_epochs_of_its_own_from_its_first_lease_on(lengths, seed):
    sets, first, expected = [], 0, []
    for n, (count, leases) in enumerate(lengths):
        sets.append(DataSet(first, str(n), count, seed, shuffle=True, source=""))
        order = PromptOrder(count, seed, shuffle=True)
        expected += [(str(n), order.index(position)) for position in range(leases)]
        first += leases
    order = DataSetOrder(sets)
    found = [order.find(lease_id) for lease_id in reversed(range(first))]
    assert [(known.digest, index) for known, index in reversed(found)] == expected


def test_a_restart_goes_on_at_the_same_position(tmp_path):
    with process(tmp_path) as (ledger, data):
        ledger.issue(7, 0)
        before = issued_for(data, 0, 20)
        assert before == epochs(OLD, 20)
    with process(tmp_path) as (_, data):
        assert issued_for(data, 0, 20) == before


def test_another_file_at_a_restart_takes_over_with_the_next_lease_and_open_leases_keep_their_prompts(
    tmp_path,
):
    with process(tmp_path) as (ledger, data):
        ledger.issue(7, 0)
        open_leases = issued_for(data, 0, 7)
    with process(tmp_path, NEW) as (ledger, data):
        assert issued_for(data, 0, 7) == open_leases
        assert issued_for(data, 7, 6) == epochs(NEW, 6)
        ledger.issue(2, 0)
    with process(tmp_path, NEW) as (ledger, data):
        assert issued_for(data, 0, 13) == [*open_leases, *epochs(NEW, 6)]
        ledger.issue(1, 0)
    with process(tmp_path, OLD) as (_, data):  # back again: a set of its own
        assert issued_for(data, 0, 10) == [*open_leases, *epochs(NEW, 3)]
        assert issued_for(data, 10, 5) == epochs(OLD, 5)


def test_another_seed_is_another_order_from_the_next_lease_on(tmp_path):
    with process(tmp_path) as (ledger, _):
        ledger.issue(7, 0)
    with process(tmp_path, seed=8) as (_, data):
        assert issued_for(data, 0, 17) == [*epochs(OLD, 7), *epochs(OLD, 10, seed=8)]


async def test_prompts_added_in_mid_run_stay_through_restarts_until_the_configured_file_changes(tmp_path):
    with process(tmp_path) as (ledger, data):
        ledger.issue(4, 0)
        added = await data.add(NEW, keep_old=False, source="new.jsonl")
        assert (added.first_lease, added.count) == (4, 3)
        ledger.issue(2, 0)
    with process(tmp_path) as (ledger, data):
        assert data.latest.source == "new.jsonl"
        assert issued_for(data, 0, 10) == [*epochs(OLD, 4), *epochs(NEW, 6)]
    with process(tmp_path, MORE) as (_, data):
        assert issued_for(data, 0, 12) == [*epochs(OLD, 4), *epochs(NEW, 2), *epochs(MORE, 6)]
        assert data.latest.source == "the file"


async def test_prompts_may_be_added_to_those_there_are_once(tmp_path):
    with process(tmp_path) as (ledger, data):
        ledger.issue(4, 0)
        both = await data.add(NEW, keep_old=True, source="new.jsonl")
        assert both.source == "the file and new.jsonl"
        assert list(data.prompts) == [*OLD, *NEW]
        ledger.issue(1, 0)
        assert await data.add(NEW, keep_old=True, source="new.jsonl") == both  # whose answer was lost
        assert issued_for(data, 4, 16) == epochs([*OLD, *NEW], 16)
        assert (await data.add(MORE, keep_old=True, source="more.jsonl")).count == 12


async def test_quarantine_lasts_in_every_epoch_and_where_old_prompts_are_kept(tmp_path):
    with process(tmp_path) as (ledger, data):
        ledger.issue(4, 0)
        data.quarantine(2)
        bad = data.prompt(2)
        assert [data.prompt(n) for n in range(15) if data.is_quarantined(n)] == [bad] * 3
        await data.add(NEW, keep_old=True, source="new.jsonl")
        assert data.quarantined == 1
    with process(tmp_path) as (ledger, data):
        assert [data.prompt(n) for n in range(4, 4 + 16) if data.is_quarantined(n)] == [bad] * 2
        await data.add(MORE, keep_old=False, source="more.jsonl")
        assert data.quarantined == 0


def test_a_run_without_prompts_left_says_so(tmp_path):
    with process(tmp_path, NEW) as (ledger, data):
        ledger.issue(3, 0)
        data.quarantine(0)
        data.refuse_exhausted()
        data.quarantine(1)
        data.quarantine(2)
        with pytest.raises(ConfigError, match="all 3 prompts of the file are quarantined"):
            data.refuse_exhausted()


def test_a_ledger_from_before_data_sets_were_noted_keeps_its_order(tmp_path):
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    ledger.issue(6, 0)
    ledger.close()
    with process(tmp_path) as (_, data):
        assert issued_for(data, 0, 12) == epochs(OLD, 12)


def test_a_copy_that_is_gone_or_was_changed_is_named(tmp_path):
    with process(tmp_path) as (ledger, data):
        ledger.issue(1, 0)
        copy = tmp_path / f"prompts-{data.latest.digest}.jsonl"
    content = copy.read_text()
    copy.write_text(content.replace("old 0", "old 9"))
    with pytest.raises(StorageError, match=r"prompts-.*\.jsonl is not the copy of the file that it was"):
        next(process(tmp_path, NEW).gen)
    copy.unlink()
    with pytest.raises(StorageError, match=r"the copy of the file cannot be read .*no such file"):
        next(process(tmp_path, NEW).gen)


def test_a_copy_gives_back_the_same_prompts(tmp_path):
    chat = Prompt(
        content=[{"role": "user", "content": "é\u2028\n"}],
        label="",
        metadata={"n": 1.5, "deep": [None, {"a": True}]},
    )
    stored = store_prompts([chat, *OLD], tmp_path)
    assert list(stored) == stored[:] == load_prompts(stored.path, PromptKeys()) == [chat, *OLD]


def test_prompts_that_are_too_long_are_skipped_until_they_fit(tmp_path):
    prompts = [Prompt(content=str(n)) for n in range(3)]
    for long in ({0, 2}, {1}, set()):
        with closing(Ledger.open(tmp_path / "ledger.sqlite")) as ledger:
            sets = DataSets(ledger, tmp_path)
            sets.configure(prompts, seed=0, shuffle=False, source="the test")
            sets.skip_long(long)
            first = ledger.next_id
            ledger.issue(3, policy_version=0)
            assert {n for n in range(3) if sets.is_quarantined(first + n)} == long
        with closing(Ledger.open(tmp_path / "ledger.sqlite")) as ledger:
            sets = DataSets(ledger, tmp_path)
            sets.configure(prompts, seed=0, shuffle=False, source="the test")
            assert sets.quarantined == len(long)
    with closing(Ledger.open(tmp_path / "ledger.sqlite")) as ledger:
        sets = DataSets(ledger, tmp_path)
        sets.configure(prompts, seed=0, shuffle=False, source="the test")
        sets.skip_long(range(3))
        with pytest.raises(ConfigError, match="or too long for the model"):
            sets.refuse_exhausted()
