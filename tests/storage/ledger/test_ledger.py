"""The ledger against a model, through crashes; and against files that are no ledger."""

import shutil
import sqlite3
import tempfile
from collections import Counter
from contextlib import closing
from copy import deepcopy
from dataclasses import astuple, dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bus.errors import ConfigError, FencedError, LostDataError, StorageError
from bus.images import ImageCount
from storage.ledger.ledger import Account, Ledger
from storage.ledger.ledger_reader import use_of_leases
from storage.ledger.sampling import Candidate
from tests.storage.ledger.ledgers import on_disk
from tests.storage.serving import refusing_disk


@dataclass
class Model:
    rolling_out: set[int] = field(default_factory=set)
    stored: set[int] = field(default_factory=set)
    steps: dict[int, set[int]] = field(default_factory=dict)
    rejected: dict[int, str] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)


class LedgerMachine(RuleBasedStateMachine):
    """Everything a dispatcher does, in any order, with crashes in between."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="ledger-"))
        self.path = self.directory / "0.sqlite"
        self.crashes = 0
        self.ledger = Ledger.open(self.path)
        self.model, self.durable = Model(), Model()

    def teardown(self) -> None:
        self.ledger.close()
        shutil.rmtree(self.directory)

    @rule(count=st.integers(0, 5), version=st.integers(0, 9))
    def issue(self, count: int, version: int) -> None:
        issued = self.ledger.issue(count, version)
        assert issued == list(range(len(self.model.versions), len(self.model.versions) + count))
        self.model.versions += [version] * count
        self.model.rolling_out.update(issued)

    @rule(lease_id=st.integers(-1, 20))
    def store(self, lease_id: int) -> None:
        assert self.ledger.store(lease_id) == (lease_id in self.model.rolling_out)
        if lease_id in self.model.rolling_out:
            self.model.rolling_out.remove(lease_id)
            self.model.stored.add(lease_id)

    @rule(lease_id=st.integers(-1, 20), reason=st.sampled_from(["stale", "zero_variance"]))
    def reject(self, lease_id: int, reason: str) -> None:
        open_groups = self.model.rolling_out | self.model.stored
        assert self.ledger.reject(lease_id, reason) == (lease_id in open_groups)
        if lease_id in open_groups:
            self.model.rolling_out.discard(lease_id)
            self.model.stored.discard(lease_id)
            self.model.rejected[lease_id] = reason

    @precondition(lambda self: self.model.stored or self.model.steps)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        complete = self.model.stored.union(*self.model.steps.values())
        some = st.lists(st.sampled_from(sorted(complete)), min_size=1, max_size=3, unique=True)
        taken = tuple(data.draw(some))
        step = max(self.model.steps, default=0) + 1
        self.ledger.lease(step, taken, [1 / (1 + lease_id) for lease_id in taken])
        self.model.stored.difference_update(taken)
        self.model.steps[step] = set(taken)

    @rule(step=st.integers(0, 6))
    def commit(self, step: int) -> None:
        self.ledger.commit(step)

    @rule(step=st.integers(0, 20), version=st.integers(0, 9))
    def forget(self, step: int, version: int) -> None:
        self.ledger.forget(step, oldest_version=version)

    @rule(step=st.integers(0, 6))
    def forget_at_the_next_start(self, step: int) -> None:
        self.ledger.set_fact("committed", str(step))
        self.model.facts["committed"] = str(step)

    @rule(step=st.integers(0, 6))
    def roll_back(self, step: int) -> None:
        undone = [self.model.steps.pop(s) for s in list(self.model.steps) if s > step]
        assert self.ledger.roll_back(step) == sum(map(len, undone))
        self.model.stored |= set().union(*undone).difference(*self.model.steps.values())

    @rule(name=st.sampled_from(["shard_0", "incarnation"]), value=st.text(max_size=3))
    def set_fact(self, name: str, value: str) -> None:
        self.ledger.set_fact(name, value)
        self.model.facts[name] = value

    @rule()
    def flush(self) -> None:
        self.ledger.flush()
        self.durable = deepcopy(self.model)

    @rule()
    def close_and_open(self) -> None:
        self.ledger.close()
        self.ledger = Ledger.open(self.path)
        self.durable = deepcopy(self.model)

    @rule()
    def crash(self) -> None:
        self.crashes += 1
        after = on_disk(self.path, self.directory / f"{self.crashes}.sqlite")
        self.ledger.close()
        self.path, self.ledger = after, Ledger.open(after)
        self.model = deepcopy(self.durable)

    @invariant()
    def agrees_with_the_model(self) -> None:
        ledger, model = self.ledger, self.model
        assert set(ledger.rolling_out) == model.rolling_out
        assert set(ledger.stored) == model.stored
        steps = range(1, max([*model.steps, *ledger.steps], default=0) + 2)
        given = {s: {use.lease_id for use in ledger.uses(s)} for s in steps}
        assert {s: groups for s, groups in given.items() if groups} == model.steps
        assert ledger.newest_step == max(model.steps, default=0)
        assert ledger.reasons == Counter(model.rejected.values())
        assert ledger.facts == model.facts
        for lease_id, lease in (ledger.rolling_out | ledger.stored).items():
            assert lease == Candidate(model.versions[lease_id], lease_id)

    @invariant()
    def accounts_for_every_group_once(self) -> None:
        account = self.ledger.account()
        assert account.balanced()
        steps, versions = self.model.steps, self.model.versions
        uses = Counter(g for groups in steps.values() for g in groups)
        assert (account.issued, account.trained) == (len(versions), len(uses))
        assert self.ledger.samples == uses.total()
        assert self.ledger.inserted() >= len(self.ledger.stored) + len(uses)
        assert all(use.weight == 1 / (1 + use.lease_id) for s in steps for use in self.ledger.uses(s))

    @rule(oldest=st.integers(0, 9))  # no invariant: an answer may bring back what was forgotten
    def knows_what_was_used(self, oldest: int) -> None:
        uses = Counter(g for groups in self.model.steps.values() for g in groups)
        found = {group.lease_id: n for group, n in self.ledger.used(oldest)}
        assert found == {g: n for g, n in uses.items() if self.model.versions[g] >= oldest}

    @rule(step=st.sampled_from([0, 2, 4, 99]))
    def owes_what_was_not_paid(self, step: int) -> None:
        open_groups = len(self.model.rolling_out) + len(self.model.stored)
        groups = set().union(*self.model.steps.values())
        paid = {g: sum(g in u for s, u in self.model.steps.items() if s <= step) for g in groups}
        for each in (1, 2):
            owed = each * open_groups + sum(max(0, each - n) for n in paid.values())
            assert self.ledger.owed(step, each, oldest_version=0) == owed


LedgerMachine.TestCase.settings = settings(max_examples=12, stateful_step_count=40)
test_ledger_agrees_with_a_simple_model_through_crashes = LedgerMachine.TestCase


def test_committed_groups_can_still_be_rolled_back(tmp_path: Path):
    """The learner may have to resume from a checkpoint before its last one."""
    path = tmp_path / "ledger.sqlite"
    with closing(Ledger.open(path)) as ledger:
        ledger.issue(2, 0)
        for step, lease_id in ((1, 0), (2, 1)):
            ledger.store(lease_id)
            ledger.lease(step, (lease_id,))
        ledger.commit(2)
    with closing(Ledger.open(path)) as ledger:
        assert ledger.roll_back(1) == 1
        assert ledger.account() == Account(issued=2, rolling_out=0, rejected=0, stored=1, trained=1)


def test_a_commit_covers_its_own_step_and_those_before(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    with closing(Ledger.open(path)) as ledger:
        ledger.issue(3, 0)
        for step, lease_id in ((1, 0), (2, 1), (3, 2)):
            ledger.store(lease_id)
            ledger.lease(step, (lease_id,))
        ledger.commit(2)
    assert [use.state for use in use_of_leases(path, range(3)).values()] == [
        "committed",
        "committed",
        "leased",
    ]


def test_groups_of_a_step_keep_their_order_through_a_restart(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    with closing(Ledger.open(path)) as ledger:
        ledger.issue(2, policy_version=3)
        ledger.issue(2, policy_version=1)  # after the learner fell back to an older version
        for lease_id in range(4):
            ledger.store(lease_id)
        ledger.lease(1, (2, 3, 0, 1))
    with closing(Ledger.open(path)) as ledger:
        assert [group.lease_id for group in ledger.steps[1]] == [2, 3, 0, 1]


def test_lease_of_another_run_was_never_issued(tmp_path: Path):
    with closing(Ledger.open(tmp_path / "ledger.sqlite")) as ledger:
        ledger.issue(3, 0)
        assert [ledger.was_issued(n) for n in (-1, 0, 2, 3)] == [False, True, True, False]


def test_full_disk_is_reported_and_loses_no_change(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    with closing(Ledger.open(path)) as ledger:
        ledger.issue(1, 0)
        ledger.flush()
        ledger.issue(1000, 1)
        with refusing_disk(), pytest.raises(StorageError, match="ledger cannot be written"):
            ledger.flush()
        ledger.store(0)
        ledger.flush()
        with closing(Ledger.open(on_disk(path, tmp_path / "crashed.sqlite"))) as after:
            assert after.account() == ledger.account()


@pytest.mark.parametrize(
    "content", [b"not a database, but long enough to be one" * 99, b"SQLite format 3\0torn"]
)
def test_foreign_file_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(content)
    with pytest.raises(LostDataError, match=r"ledger\.sqlite is not a ledger that can be used"):
        Ledger.open(path)
    assert path.read_bytes() == content


def test_database_of_another_program_is_refused_untouched(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE bookmarks (url TEXT)")
    content = path.read_bytes()
    with pytest.raises(StorageError, match="it holds bookmarks"):
        Ledger.open(path)
    assert path.read_bytes() == content


def test_torn_ledger_is_refused(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    with closing(Ledger.open(path)) as ledger:
        ledger.issue(5000, 0)
    content = path.read_bytes()
    for length in (len(content) // 2, 4096, 100):
        path.write_bytes(content[:length])
        with pytest.raises(StorageError, match="is not a ledger that can be used"):
            Ledger.open(path)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        ("DELETE FROM leases WHERE lease_id = 1", "lacks some of its 3 leases"),
        ("UPDATE leases SET state = 'lost' WHERE lease_id = 1", "lease 1 is 'lost'"),
        ("UPDATE leases SET state = 'leased' WHERE lease_id = 1", "1 leases are in steps, which name 0"),
    ],
)
def test_ledger_whose_entries_do_not_add_up_is_refused(tmp_path: Path, damage: str, complaint: str):
    path = tmp_path / "ledger.sqlite"
    with closing(Ledger.open(path)) as ledger:
        ledger.issue(3, 0)
    with closing(sqlite3.connect(path)) as other:
        other.execute(damage)
        other.commit()
    with pytest.raises(LostDataError, match=complaint):
        Ledger.open(path)


def test_ledger_in_a_place_that_cannot_hold_one_is_refused(tmp_path: Path):
    (tmp_path / "ledger.sqlite").mkdir()
    with pytest.raises(StorageError, match="unable to open"):
        Ledger.open(tmp_path / "ledger.sqlite")


@pytest.mark.parametrize("version", [2, 9])
def test_ledger_of_another_build_is_refused_untouched(tmp_path: Path, version: int):
    path = tmp_path / "ledger.sqlite"
    Ledger.open(path).close()
    with closing(sqlite3.connect(path)) as other:
        other.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(
        LostDataError,
        match=rf"its schema is {version}, this build's is 3: go on with the build that wrote it",
    ):
        Ledger.open(path)


def test_a_ledger_without_counts_of_computed_tokens_and_images_goes_on_and_gets_them(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    with closing(Ledger.open(path)) as ledger:
        ledger.issue(2, policy_version=0)
        ledger.store(0, tokens=9)
        ledger.flush()
    with closing(sqlite3.connect(path)) as other:
        for column in ("computed_tokens", "images", "image_tokens"):
            other.execute(f"ALTER TABLE leases DROP COLUMN {column}")
    with closing(Ledger.open(path)) as ledger:
        ledger.store(1, tokens=9, computed_tokens=5, images=ImageCount(2, 4))
        ledger.flush()
    with closing(Ledger.open(path)) as ledger:
        found = [astuple(group) for group in ledger.stored.values()]
        assert found == [(0, 0, 0.0, 9, 0, 0, 0), (0, 1, 0.0, 9, 5, 2, 4)]


def test_group_given_to_several_steps_goes_back_only_when_none_has_it(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    with closing(Ledger.open(path)) as ledger:
        ledger.issue(1, 0)
        ledger.store(0, spread=0.25, tokens=100)
        for step in (1, 2, 3):
            ledger.lease(step, [0], [step / 4])
        ledger.commit(1)
    for step, uses in ((2, 2), (1, 1), (0, 0)):
        with closing(Ledger.open(path)) as ledger:
            ledger.roll_back(step)
            assert (ledger.samples, len(ledger.stored)) == (uses, uses == 0)
    with closing(Ledger.open(path)) as ledger:
        assert (ledger.stored[0].spread, ledger.stored[0].tokens) == (0.25, 100)


def test_facts_about_a_lease_end_with_it(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    with closing(Ledger.open(path)) as ledger:
        ledger.issue(3, 0)
        for lease_id in range(3):
            ledger.set_fact(f"attempts.{lease_id}", "1")
        ledger.flush()
        ledger.store(0)
        ledger.reject(1, "stale")
        assert ledger.facts == {"attempts.2": "1"}
    with closing(Ledger.open(path)) as ledger:
        assert ledger.facts == {"attempts.2": "1"}


def test_a_ledger_has_one_writer_at_a_time(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    with closing(Ledger.open(path)), pytest.raises(ConfigError, match="is in use by another process"):
        Ledger.open(path)
    Ledger.open(path).close()


def test_a_writer_that_was_replaced_changes_nothing_any_more(tmp_path: Path):
    """The lock keeps nobody out on some network file systems."""
    path = tmp_path / "ledger.sqlite"
    replaced = Ledger.open(path)
    replaced.issue(1, 0)
    replaced.flush()
    (tmp_path / ".ledger.sqlite.lock").unlink()
    with closing(Ledger.open(path)) as successor:
        replaced.issue(1, 0)
        with pytest.raises(FencedError, match="epoch 2 has followed 1"):
            replaced.flush()
        assert successor.issue(2, 0) == [1, 2]
        successor.flush()
    replaced.close()
    with closing(Ledger.open(path)) as after:
        assert after.next_id == 3
