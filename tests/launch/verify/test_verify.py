"""`launch verify`: each way in which a trajectory can go wrong has a verdict of its own."""

import asyncio
import json
import shutil
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from bus.codec import Json
from bus.messages import RewardGiven
from bus.trajectory import Trajectory
from launch.cli import main as cli
from launch.settings.run_config import resolve
from launch.verify.comparison import NOT_VERIFIABLE, VERDICTS, Verdicts, status_of
from launch.verify.evidence import read_store
from launch.verify.verify import screen, verified, verify_run
from learner.progress import lineage
from storage.account.records import ACTORS, GIVEN, TRAINED, AccountRecord, AccountWriter, Copy, Kind
from storage.disk.run_directory import RunDirectory
from storage.ledger.ledger import Ledger
from storage.store import layout
from storage.store.replay import ReplayStore
from tests.bus.security.secured import by_role, make_streams, secured_bus
from tests.factories import make_trajectory

GROUPS, SAMPLES = 6, 2


@dataclass
class Run:
    """A run on the disk whose parts a test may set apart."""

    directory: RunDirectory
    ledger: Ledger
    store: ReplayStore
    sequence: int = 0
    now_s: float = 100.0

    def writer(self, actor: str = "test") -> AccountWriter:
        return AccountWriter(self.directory.path / ACTORS, actor)

    def send(self, *sent: Trajectory, acked: bool = True, **changes) -> None:
        """Note what the actor of these trajectories notes, a second after the other."""
        for one in sent:
            self.sequence, self.now_s = self.sequence + 1, self.now_s + 1
            record = AccountRecord(Kind.SENT, Copy.of(one), since_s=self.now_s, written_s=self.now_s)
            answer = record._replace(kind=Kind.ACKNOWLEDGED, number=self.sequence, written_s=self.now_s + 0.1)
            self.writer(one.actor).add([record, *([answer._replace(**changes)] if acked else [])])

    def train(self, step: int, leases: list[int], *trained: Trajectory, incarnation: str = "a") -> None:
        """Note what the learner notes of a step."""
        records = [AccountRecord(Kind.TRAINED, Copy.of(one), step) for one in trained]
        AccountWriter(self.directory.path / TRAINED, incarnation).add(records)
        line = lineage.TrainedStep(
            step=step, policy_version=step, incarnation=incarnation, leases=tuple(leases)
        )
        lineage.record(self.directory.path / "lineage.jsonl", line)

    def give(self, *given: tuple[Trajectory, float]) -> None:
        """Note what the judge notes of late rewards."""
        copies = [Copy(one.lease_id, one.sample, bytes(16), reward) for one, reward in given]
        writer = AccountWriter(self.directory.path / GIVEN, "judge")
        writer.add([AccountRecord(Kind.GIVEN, copy) for copy in copies])

    async def verdicts(self, *lists: Path) -> Verdicts:
        self.ledger.flush()
        return await verified(self.directory, lists)

    async def found(self, *lists: Path) -> dict[str, set[str]]:
        """Return what each verdict names, but for those without any."""
        verdicts = await self.verdicts(*lists)
        return {name: set(things) for name, things in verdicts.found.items() if things}


def group(lease: int, **changes: object) -> list[Trajectory]:
    return [replace(make_trajectory(lease, n, group_size=SAMPLES), **changes) for n in range(SAMPLES)]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr("launch.verify.verify.PAUSE_S", 0.0)
    monkeypatch.setattr("launch.verify.verify.CONNECT_S", 0.1)


@pytest.fixture
def run(tmp_path):
    """A run of one shard in which three groups of six were sent and stored, and two of them trained on."""
    directory = RunDirectory(tmp_path, "mine")
    settings = {"run": "mine", "directory": str(tmp_path), "data": {"task": "sort"}, "replay": {"shards": 1}}
    directory.config.write_text(resolve(settings).model_dump_json())
    with (
        closing(Ledger.open(directory.ledger)) as ledger,
        closing(ReplayStore.open(directory.replay(0))) as store,
    ):
        made = Run(directory, ledger, store)
        assert ledger.issue(GROUPS, 0) == list(range(GROUPS))
        for lease in range(3):
            made.send(*group(lease))
            store.append(group(lease))
        made.train(1, [0, 1], *group(0), *group(1))
        yield made


async def test_a_run_in_which_all_is_well_has_totals_and_nothing_else(run):
    found = await run.verdicts()
    assert not found.is_broken
    assert dict(found.totals) == {"acknowledged": 6, "stored": 6, "trained": 4, "steps": 1}
    assert await run.found() == {}


async def test_what_was_acknowledged_and_is_not_stored_is_lost(run):
    run.send(group(3)[0])
    run.send(*group(4))
    run.store.append(group(4))  # so that what came before it is not on its way
    found = await run.verdicts()
    assert found.found["lost"] == {
        "g00000003.0": "message 7 to test's account; nothing of that name is stored"
    }
    assert found.is_broken


async def test_what_came_last_may_still_be_on_the_bus_which_nobody_can_ask(run):
    run.send(*group(3))
    assert await run.found() == {"in_flight": {"g00000003.0", "g00000003.1"}}


@pytest.mark.nats
async def test_a_key_that_may_not_read_trajectories_does_not_tell_what_the_bus_holds(
    run, tmp_path, monkeypatch
):
    monkeypatch.setattr("launch.verify.verify.CONNECT_S", 30.0)
    run.send(*group(3))
    run.ledger.flush()
    async with secured_bus(tmp_path, "mine") as (secure, server):
        await make_streams(by_role(secure))

        async def told(role: str) -> dict[str, Json]:
            bus = {"url": server.url, "creds": secure.path / "mine" / f"{role}.creds"}
            where = resolve({"run": "mine", "directory": str(tmp_path), "bus": bus})
            return await verify_run(where, (), asyncio.Event())

        watcher, operator = await told("watcher"), await told("operator")
        run.store.append(group(3))
        nothing_to_ask = await told("watcher")
    assert nothing_to_ask["bus"] is True
    assert (watcher["bus"], operator["bus"]) == (False, True)
    assert "operator.creds" in screen(watcher)
    monkeypatch.setattr("launch.verify.verify.CONNECT_S", 0.2)
    assert "; the bus was not asked: " in screen(await told("operator"))  # it is gone, as is said
    assert (watcher["in_flight"], operator["lost"]) == (2, 2)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"reward": -1.0}, "its reward was sent as 1.0 and is stored as -1.0"),
        ({"token_ids": make_trajectory(5, 1).token_ids}, "its content is not what test sent"),
        ({"metadata": {"label": "42"}}, "its content is not what test sent"),
    ],
    ids=["reward", "tokens", "metadata"],
)
async def test_what_is_stored_otherwise_than_it_was_sent_is_altered(run, change, why):
    run.send(*group(3))
    run.store.append([replace(group(3)[0], **change), group(3)[1]])
    found = await run.verdicts()
    assert found.found["altered"] == {"g00000003.0": why}
    assert found.found["lost"] == {}


async def test_swapped_siblings_are_both_altered(run):
    run.send(*group(3))
    one, other = group(3)
    names = {"trajectory_id", "sample", "rollout"}
    run.store.append([replace(other, **{n: getattr(one, n) for n in names}), one_as(other, one, names)])
    assert await run.found() == {"altered": {"g00000003.0", "g00000003.1"}}


def one_as(other: Trajectory, one: Trajectory, names: set[str]) -> Trajectory:
    return replace(one, **{name: getattr(other, name) for name in names})


async def test_a_group_in_two_steps_is_used_twice_and_so_is_a_trajectory_in_one(run):
    run.train(2, [1, 2], *group(1), *group(2))
    run.train(3, [2], *group(2), group(2)[0])
    found = (await run.verdicts()).found["twice"]
    assert found == {
        "g00000001": "in 2 steps, 1 allowed", "g00000002": "in 2 steps, 1 allowed",
        "g00000002.0": "2 times in step 3",
    }  # fmt: skip


async def test_a_step_that_another_learner_trained_again_counts_once(run):
    run.train(1, [0, 2], *group(0), *group(2), incarnation="b")
    assert await run.found() == {}


async def test_a_step_on_other_groups_than_its_lineage_says_is_found(run):
    run.train(2, [2, 3], *group(2), *group(2))
    found = await run.verdicts()
    assert found.found["twice"].keys() == {"g00000002.0", "g00000002.1"}
    assert found.found["altered"] == {"step 2": "lineage and learner differ about groups g00000003"}


@pytest.mark.parametrize("change", [{"reward": 0.5}, {"token_ids": make_trajectory(5, 1).token_ids}], ids=str)
async def test_what_was_trained_on_is_what_is_stored(run, change):
    run.train(2, [2], replace(group(2)[0], **change), group(2)[1])
    assert await run.found() == {"altered": {"g00000002.0"}}


async def test_a_lease_that_is_rolled_out_again_after_an_answer_is_named_with_both_actors(run):
    again = [replace(one, behaviour_logprobs=one.behaviour_logprobs * 2, actor="later") for one in group(3)]
    run.send(*group(3))
    run.send(*again)
    run.store.append(again)  # the first ones were acked before they were written
    found = await run.verdicts()
    assert found.found["lost"].keys() == {"g00000003.0", "g00000003.1"}
    assert "another copy of it is stored" in found.found["lost"]["g00000003.0"]
    assert found.found["re_rolled"] == {
        "g00000003": "g00000003.0 was acknowledged to test 1.9 s before later sent it again"
    }


async def test_the_later_one_of_two_copies_is_explained_by_its_shard(run):
    again = [replace(one, behaviour_logprobs=one.behaviour_logprobs * 2, actor="later") for one in group(3)]
    run.send(*group(3))
    run.store.append(group(3))
    run.send(*again)
    run.store.append(again)
    found = await run.found()
    assert found == {"another_copy": {"g00000003.0", "g00000003.1"}, "re_rolled": {"g00000003"}}


async def test_a_copy_whose_name_the_bus_had_before_is_explained(run):
    again = replace(group(2)[0], behaviour_logprobs=group(2)[0].behaviour_logprobs * 2)
    run.send(again, flag=True)
    found = await run.found()
    assert found == {"another_copy": {"g00000002.0"}, "re_rolled": {"g00000002"}}


async def test_a_lost_copy_that_was_sent_twice_is_no_other_copy_of_what_was_rolled_out_in_its_place(run):
    run.send(*group(3), flag=True)  # its sender missed the first answer, and no other copy was sent before
    again = [replace(one, behaviour_logprobs=one.behaviour_logprobs * 2) for one in group(3)]
    run.send(*again)
    run.store.append(again)
    run.sequence = 50
    run.send(*group(4))
    run.store.append(group(4))
    found = await run.found()
    assert found == {"lost": {"g00000003.0", "g00000003.1"}, "re_rolled": {"g00000003"}}


async def test_a_rejection_that_keeps_no_trajectory_from_the_store_explains_no_loss(run):
    """A group that lacks a lost trajectory is rejected as incomplete, by `admission.incomplete = "drop"`."""
    run.send(*group(3), *group(4))
    run.store.append([group(3)[0], *group(4)])
    run.ledger.reject(3, "incomplete")
    found = await run.verdicts()
    assert found.found["lost"].keys() == {"g00000003.1"}
    assert found.found["lost"]["g00000003.1"].endswith("its lease was rejected: incomplete")


async def test_groups_that_end_without_a_trajectory_are_explained(run):
    short, rejected, settled = group(3), group(4), group(5)
    run.send(*short, *rejected, *settled)
    run.store.append(short[:1])
    run.store.close_short([3], fewest=1)
    run.store.append(short[1:])
    run.ledger.reject(4, "set_aside")
    assert run.store.settle(6, [0, 1, 3, 4], seen=3)
    run.store.append(settled)
    run.sequence = 50
    found = await run.verdicts()
    assert found.found["closed_short"].keys() == {"g00000003.1"}
    assert found.found["rejected"] == dict.fromkeys(["g00000004.0", "g00000004.1"], "set_aside")
    assert found.found["settled"].keys() == {"g00000005.0", "g00000005.1"}
    assert not found.is_broken


async def test_what_retention_removed_is_explained_and_its_neighbours_are_not(run):
    run.send(*group(3), *group(4))
    run.store.append(group(4))
    run.store.retire(run.store.entries[0], None)  # the segment of group 0
    found = await run.found()
    assert found["retired"] == {"g00000000.0", "g00000000.1"}
    assert found["lost"] == {"g00000003.0", "g00000003.1"}


async def test_a_reward_that_came_later_is_no_other_reward(run):
    due = group(3, reward_due=True, reward=0.0)
    run.send(*due)
    run.store.append(due)
    for one in due:
        reward = RewardGiven(trajectory_id=one.trajectory_id, reward=0.5 + one.sample, source="judge")
        run.store.give([reward])
    trained = [replace(one, reward=0.5 + one.sample, reward_due=False) for one in due]
    run.train(2, [3], *trained)
    late = {"g00000003.0", "g00000003.1"}
    assert await run.found() == {"late_rewards": late, "not_verifiable": late}
    run.give(*((one, 0.5 + one.sample) for one in due))
    assert await run.found() == {"late_rewards": late}
    run.train(3, [3], replace(trained[0], reward=1.5))
    assert (await run.verdicts()).found["altered"].keys() == {"g00000003.0"}


async def test_a_late_reward_that_was_given_otherwise_is_altered_and_one_that_nobody_gave_is_unlisted(run):
    due = group(3, reward_due=True, reward=0.0)
    run.send(*due)
    run.store.append(due)
    run.store.give([RewardGiven(trajectory_id=one.trajectory_id, reward=0.0, source="judge") for one in due])
    run.give((due[0], 1.0))
    found = await run.verdicts()
    assert found.found["altered"] == {"g00000003.0": "its late reward was given as 1.0 and is stored as 0.0"}
    assert found.found["unlisted"].keys() == {"g00000003.1"}


async def test_a_late_reward_of_a_giver_on_another_host_is_not_verifiable_whatever_others_gave(run):
    due = group(3, reward_due=True, reward=0.0)
    run.send(*due)
    run.store.append(due)
    run.give((due[0], 1.0))
    for one in due:
        run.store.give([RewardGiven(trajectory_id=one.trajectory_id, reward=0.5, source="judge elsewhere")])
    late = {"g00000003.0", "g00000003.1"}
    assert await run.found() == {"late_rewards": late, "not_verifiable": late}


async def test_what_no_actor_sent_and_steps_without_records_end_with_status_1(run):
    run.store.append(group(3))
    run.train(2, [3], *group(3))
    found = await run.verdicts()
    assert found.found["unlisted"].keys() == {"g00000003.0", "g00000003.1"}
    assert status_of(found.to_json()) == 1


async def test_a_step_of_which_a_learner_with_records_has_none_ends_with_status_1(run):
    run.train(2, [2])
    found = await run.verdicts()
    assert found.found["steps_without_records"].keys() == {"step 2"}
    assert status_of(found.to_json()) == 1


async def test_a_run_without_any_account_is_not_called_clean(run):
    shutil.rmtree(run.directory.path / "account")
    found = await run.verdicts()
    assert len(found.found["not_verifiable"]) == 7  # six trajectories and a step
    assert status_of(found.to_json()) == NOT_VERIFIABLE
    assert not found.is_broken


@pytest.mark.parametrize("part", [ACTORS, TRAINED])
async def test_records_that_were_removed_are_not_verifiable(run, part):
    name = "test" if part == ACTORS else "a"
    for path in (run.directory.path / part).glob("*.records"):
        path.unlink()
    run.train(2, [2], *group(2)) if part == TRAINED else run.send(*group(2))
    (run.directory.path / part / f"{name}.incomplete").touch()
    found = await run.verdicts()
    assert (found.is_broken, status_of(found.to_json())) == (False, NOT_VERIFIABLE)


async def test_a_stream_that_went_back_has_lost_what_came_after(run):
    run.send(*group(3))  # messages 7 and 8
    run.sequence = 6
    run.send(*group(4))  # messages 7 and 8 again
    run.store.append(group(4))
    assert await run.found() == {"lost_with_bus": {"g00000003.0", "g00000003.1"}}


async def test_a_number_of_another_shards_stream_excuses_nothing(run):
    recorded = json.loads(run.directory.config.read_text())
    recorded["replay"]["shards"] = 2
    run.directory.config.write_text(json.dumps(recorded))
    ReplayStore.open(run.directory.replay(1)).close()
    run.send(*group(3))  # messages 7 and 8 of the second shard's stream
    run.sequence = 6
    run.send(*group(4), *group(5))  # messages 7 and 8 of the first one's, and 9 and 10 of the second one's
    run.store.append([*group(4), *group(5)])
    assert await run.found() == {"lost": {"g00000003.0", "g00000003.1"}}


async def test_an_actor_that_died_before_the_answer_is_explained(run):
    run.send(*group(3), acked=False)
    run.store.append(group(3))
    assert await run.found() == {}
    run.train(2, [3], *group(3))
    assert await run.found() == {"never_acknowledged": {"g00000003.0", "g00000003.1"}}


async def test_records_of_other_hosts_may_be_given(run, tmp_path):
    foreign = group(3, actor="elsewhere")
    run.store.append(foreign)
    assert await run.found() == {"not_verifiable": {"g00000003.0", "g00000003.1"}}
    (run.directory.path / ACTORS).rename(tmp_path / "here")
    run.send(*foreign)
    (run.directory.path / "account").rename(tmp_path / "copied")
    (run.directory.path / "account").mkdir()
    (tmp_path / "copied/trained").rename(run.directory.path / "account/trained")
    (tmp_path / "here").rename(run.directory.path / ACTORS)
    assert await run.found(tmp_path / "copied") == {}


async def test_records_of_an_earlier_run_of_this_name_say_nothing(run):
    run.writer().add([AccountRecord(Kind.ACKNOWLEDGED, Copy.of(group(5)[0]), 1)], run="another identity")
    assert await run.found() == {}


async def test_a_store_is_read_while_its_writer_merges_segments(run, monkeypatch):
    monkeypatch.setattr(layout, "MERGE_SEGMENTS", 2)
    opened = ReplayStore.open
    merges = iter([True, True])

    def open_then_merge(*arguments, **named):
        found = opened(*arguments, **named)
        if not named.get("writable", True) and next(merges, False):
            assert run.store.compact()
            run.store.append(group(3))
            run.store.append(group(4))
        return found

    run.send(*group(3), *group(4))
    monkeypatch.setattr(ReplayStore, "open", open_then_merge)
    assert await run.found() == {}


async def test_a_damaged_segment_is_named(run):
    path = run.directory.replay(0) / run.store.entries[1].name / "group.zip"
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)
    with pytest.raises(Exception, match="segment_00000001"):
        read_store(run.directory.replay(0), None)


def test_the_command_says_so_with_its_status(run, tmp_path, capsys):
    def told(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["verify", "--run", "mine", "--directory", str(tmp_path), *arguments])
        return int(ended.value.code or 0), capsys.readouterr().out

    run.ledger.flush()
    status, text = told()
    assert status == 0
    assert text.startswith(
        "mine: 6 trajectories acknowledged, 6 stored, 4 trained on in 1 steps; the bus was not"
    )
    run.send(group(3)[0])
    run.send(*group(4))
    run.store.append(group(4))
    status, text = told("--json")
    assert status == 1
    assert json.loads(text)["named"]["lost"].keys() == {"g00000003.0"}
    assert json.loads(text).keys() >= VERDICTS.keys()
    assert "g00000003.0: message 7" in screen(json.loads(text))
