"""The storage process as a whole: what it refuses at the start, and what it tells others."""

import asyncio
import json
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from transformers import Qwen3Config

from actors.metrics.counters import report_end
from bus.codec import decode, encode
from bus.connection import Bus
from bus.errors import ConfigError, NoActorsError, SluiceError, leaves
from bus.evaluation_messages import PromptSet
from bus.messages import BlobRef, GroupRejected, ModelFiles, RoleHolder, RunIdentity, RunRecord, Status
from bus.requests import StepGroups, StepGroupsRequest, StoredGroups, StoredRequest
from bus.streams import lost_data
from bus.streams.blob_store import get_blob, put_blob
from bus.streams.consume import Inbox
from bus.streams.publish import Publisher
from bus.topology import remove
from launch.process.runtime import for_user
from storage.client.reader import ReplayReader
from storage.dispatch import absent_actors
from storage.ledger.ledger import Ledger
from storage.model_files.packed_files import unbundle
from storage.prompts import updates
from storage.prompts.length_check import check_lengths
from storage.service import StorageSettings, run_storage
from storage.settings.replay import ReplayConfig
from storage.store.replay import ReplayStore
from storage.weights.blob_stores import on_bus
from tests.conftest import Connect
from tests.factories import make_trajectory
from tests.pictures import image_part, picture
from tests.storage.served_storage import files_of_a_model, make_settings, publish_policy, write_prompts
from tests.storage.serving import (
    BLOB,
    LearnerStandIn,
    has,
    leases,
    messages,
    running,
    send,
    send_groups,
    send_rejections,
    until,
)

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick", "quick_roles")]


BESIDE = {
    "report_status", "tell_pace", "keep_streams", "OwnRecords.keep", "HeldoutBlobs.keep", "report_sources",
    "DataUpdates.run", "Dispatcher.run", "run_shard", "_Service._watch_queues", "_Service._record",
    "_Service._tell_when_ready", "_Service._admit_when_checked",
}  # fmt: skip
"""What storage does at the same time."""


@pytest.fixture(scope="module")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return files_of_a_model(tmp_path_factory.mktemp("model"))


async def announced(bus: Bus, settings: StorageSettings) -> None:
    """Run storage until it has announced its run, of which its directory has the settings then."""
    async with storage(bus, settings):
        await bus.wait_for("run", RunRecord, timeout_s=60, hint="storage starts")
        assert json.loads(settings.run.config.read_text()) == json.loads(settings.config_json)
        record, holder = await bus.get("run", RunRecord), await bus.get("role.dispatcher", RoleHolder)
        assert record[0].announced_by == holder[0].incarnation
    await bus.delete("run")


async def test_two_runs_of_one_name_do_not_share_a_bus(bus: Bus, tmp_path: Path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, other = (make_settings(tmp_path / name, "sort 21") for name in ("one", "two"))
    await announced(bus, one)
    remedy = r"another run 'test', which is kept on .*/one/runs/test: choose another --run, or free"
    with pytest.raises(ConfigError, match=remedy):
        await run_storage(bus, other, asyncio.Event())
    await announced(bus, one)
    await remove(bus.js, bus.topology)
    await announced(bus, other)


@pytest.mark.parametrize(("left", "stays"), [('{"seed": 0}', True), ('{"seed": 1}', False)])
async def test_nobody_joins_by_settings_of_an_earlier_launch(
    bus: Bus, tmp_path: Path, left: str, stays: bool
):
    """Storage that is yet to read its prompts, and fails before, has withdrawn them already."""
    settings = make_settings(tmp_path, "sort 21")
    with closing(Ledger.open(settings.run.ledger)) as ledger:
        ledger.set_fact("shards", "5")
    await bus.put("run", RunRecord(name="test", config_json=left))
    with pytest.raises(ConfigError, match="keeps its replay in 5 shards"):
        await run_storage(bus, settings, asyncio.Event())
    assert (await bus.get("run", RunRecord) is not None) == stays
    assert not settings.run.config.exists()  # it says what was announced


async def test_storage_is_the_dispatcher_before_it_reads_its_prompts(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whoever joins is to see meanwhile that what the bus keeps was announced by another."""
    loop = asyncio.get_running_loop()
    held: list[object] = []

    def read(*_: object, **__: object) -> None:
        looking = asyncio.run_coroutine_threadsafe(bus.get("role.dispatcher", RoleHolder), loop)
        held.append(looking.result(timeout=60))
        raise ConfigError("no such prompts")

    monkeypatch.setattr("storage.service.read_prompts", read)
    with pytest.raises(ConfigError, match="no such prompts"):
        await run_storage(bus, make_settings(tmp_path, "sort 21"), asyncio.Event())
    assert held != [None]
    assert await bus.get("role.dispatcher", RoleHolder) is None


async def test_the_role_is_renewed_while_a_large_ledger_is_opened(bus: Bus, tmp_path: Path, monkeypatch):
    settings, opened, opening = make_settings(tmp_path, "sort 21"), Ledger.open, threading.Event()
    seen: list[object] = []

    def slowly(path: Path) -> Ledger:
        looked = asyncio.run_coroutine_threadsafe(bus.get("role.dispatcher", RoleHolder), loop)
        seen.append(looked.result(timeout=60))  # only a loop that is free can answer
        opening.set()
        return opened(path)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(Ledger, "open", slowly)
    async with storage(bus, settings):
        assert await asyncio.to_thread(opening.wait, 60)
    assert seen != [None]


async def test_storage_is_ready_once_its_dispatcher_and_shards_answer(bus: Bus, tmp_path: Path):
    with capture_logs() as said:
        async with storage(bus, make_settings(tmp_path, "sort 21")), asyncio.timeout(60):
            await until(lambda: any(line["event"] == "storage_ready" for line in said))
            request = StepGroupsRequest(step=0)
            await bus.request(bus.subject("rpc", "step_groups"), request, StepGroups, timeout_s=20)
            for shard in (0, 1):
                asked = StoredRequest(after=0)
                await bus.request(bus.subject("rpc", "stored", shard), asked, StoredGroups, timeout_s=20)


@pytest.mark.parametrize("name", ["metrics.jsonl", "counters.jsonl"])
async def test_storage_whose_files_cannot_be_opened_is_never_ready_and_names_them(
    bus: Bus, tmp_path: Path, name: str
):
    settings = make_settings(tmp_path, "sort 21")
    blocked = settings.run.path / name
    blocked.mkdir(parents=True)
    with capture_logs() as said, pytest.raises(BaseException) as caught:  # noqa: PT011 - looked at below
        async with asyncio.timeout(60):
            await run_storage(bus, settings, asyncio.Event())
    assert not any(line["event"] == "storage_ready" for line in said)
    errors = [for_user(error) for error in leaves(caught.value)]
    assert all(isinstance(error, SluiceError) and str(blocked) in str(error) for error in errors)


def storage(bus: Bus, settings: StorageSettings):
    return running(lambda stop: run_storage(bus, settings, stop))


async def test_run_without_prompts_is_refused(bus, tmp_path):
    with pytest.raises(ConfigError, match="no prompts: give --prompts FILE"):
        await run_storage(bus, make_settings(tmp_path), asyncio.Event())


async def test_a_prompt_that_no_message_of_the_bus_carries_is_refused_before_the_run_is_announced(
    bus, tmp_path
):
    settings = make_settings(tmp_path, "2 + 2 =", "x" * bus.client.max_payload)
    with pytest.raises(ConfigError, match=r"prompts\.jsonl: prompt 2 has \d+ bytes .* raise max_payload"):
        await run_storage(bus, settings, asyncio.Event())
    assert await bus.get("run", RunRecord) is None


async def test_archive_that_cannot_be_used_is_refused(bus, tmp_path):
    replay = ReplayConfig(archive="nonsense://bucket")
    with pytest.raises(ConfigError, match=r"replay\.archive: nonsense://bucket/test cannot be written"):
        await run_storage(bus, replace(make_settings(tmp_path, "2 + 2 ="), replay=replay), asyncio.Event())
    assert await bus.get("run", RunRecord) is None


async def test_prompts_are_checked_against_the_model_before_the_first_lease(bus, tmp_path, model_files):
    heldout = write_prompts(tmp_path / "heldout.jsonl", "4 + 4 =")
    async with storage(bus, make_settings(tmp_path, "2 + 2 =", "x" * 20, heldout=heldout)):
        await until(lambda: is_known(bus))
        assert await messages(bus, "TASKS") == 0
        await publish_policy(bus, await put_blob(bus, Publisher(bus), encode(model_files), "model"))
        await has(bus, "TASKS", 4)
        found = await bus.get("heldout", BlobRef)
        assert found is not None
        assert [p.content for p in decode(await get_blob(bus, found[0]), PromptSet).prompts] == ["4 + 4 ="]


async def test_prompts_that_were_checked_are_not_checked_again_by_a_restart(
    bus, tmp_path, model_files, monkeypatch
):
    checks: list[int] = []

    async def counted(*arguments: object, max_new_tokens: int) -> None:
        checks.append(max_new_tokens)
        await check_lengths(*arguments, max_new_tokens=max_new_tokens)

    monkeypatch.setattr("storage.service.check_lengths", counted)
    await publish_policy(bus, await put_blob(bus, Publisher(bus), encode(model_files), "model"))
    settings = make_settings(tmp_path, "2 + 2 =", "x" * 20)
    async with storage(bus, settings):
        await has(bus, "TASKS", 4)
    async with storage(bus, settings):
        await send_rejections(bus, [0])
        await has(bus, "TASKS", 5)  # leases are let out again
    assert checks == [10]
    with pytest.raises(ExceptionGroup) as failure:
        await run_storage(bus, replace(settings, max_new_tokens=11), asyncio.Event())
    assert failure.group_contains(ConfigError, match="prompt 2 has 22 tokens: with 11 new ones")
    assert checks == [10, 11]


async def is_known(bus: Bus) -> bool:
    return await bus.get("run", RunRecord) is not None


async def test_prompt_longer_than_the_context_of_a_model_here_is_refused_before_anything_starts(
    bus, tmp_path, model_files
):
    unbundle(model_files, tmp_path / "model")
    settings = replace(make_settings(tmp_path, "ab", "x" * 22), model=tmp_path / "model")
    async with asyncio.timeout(60):
        with pytest.raises(ConfigError, match="prompt 2 has 24 tokens: with 10 new ones it exceeds"):
            await run_storage(bus, settings, asyncio.Event())
    assert await bus.get("run", RunRecord) is None


async def test_prompt_longer_than_the_context_stops_the_run_and_is_named(bus, tmp_path, model_files):
    await publish_policy(bus, await put_blob(bus, Publisher(bus), encode(model_files), "model"))
    with pytest.raises(ExceptionGroup) as failure:
        await run_storage(bus, make_settings(tmp_path, "2 + 2 =", "x" * 21), asyncio.Event())
    reason = r"prompt 2 has 23 tokens: with 10 new ones it exceeds the model's context of 32"
    assert failure.group_contains(ConfigError, match=reason)
    assert await messages(bus, "TASKS") == 0


@pytest.mark.parametrize("model_is_here", [True, False])
async def test_a_held_out_image_that_the_model_cannot_see_stops_the_run(
    bus, tmp_path, model_files, model_is_here
):
    settings = make_settings(tmp_path, "2 + 2 =")
    shown = [{"role": "user", "content": [image_part(picture())]}]
    heldout = write_prompts(tmp_path / "heldout.jsonl", "3 + 3 =", shown)
    settings = replace(settings, data=settings.data.model_copy(update={"heldout": heldout}))
    if model_is_here:
        unbundle(model_files, tmp_path / "model")
        settings = replace(settings, model=tmp_path / "model")
    await publish_policy(bus, await put_blob(bus, Publisher(bus), encode(model_files), "model"))
    reason = "prompt 2 of the held-out prompts: it shows an image, and the model reads nothing but text"
    async with asyncio.timeout(60):
        with pytest.raises(ConfigError if model_is_here else ExceptionGroup) as failure:
            await run_storage(bus, settings, asyncio.Event())
    assert (await bus.get("run", RunRecord) is None) == model_is_here
    if model_is_here:
        failure.match(reason)
    else:
        assert failure.group_contains(ConfigError, match=reason)
    assert await messages(bus, "TASKS") == 0


async def test_other_held_out_prompts_are_looked_at_though_those_to_train_on_were_checked(
    bus, tmp_path, model_files
):
    await publish_policy(bus, await put_blob(bus, Publisher(bus), encode(model_files), "model"))
    heldout = write_prompts(tmp_path / "heldout.jsonl", "3 + 3 =")
    settings = make_settings(tmp_path, "2 + 2 =", heldout=heldout)
    async with storage(bus, settings):
        await has(bus, "TASKS", 4)
    write_prompts(heldout, [{"role": "user", "content": [image_part(picture())]}])
    async with asyncio.timeout(60):
        with pytest.raises(ExceptionGroup) as failure:
            await run_storage(bus, settings, asyncio.Event())
    assert failure.group_contains(ConfigError, match="prompt 1 of the held-out prompts: it shows an image")


async def test_prompts_that_are_too_long_are_left_out_where_the_run_says_so(bus, tmp_path, model_files):
    await publish_policy(bus, await put_blob(bus, Publisher(bus), encode(model_files), "model"))
    settings = make_settings(tmp_path, "2 + 2 =", "x" * 21, "3 + 3 =")
    skipping = settings.data.model_copy(update={"long_prompts": "skip", "shuffle": False})
    async with storage(bus, replace(settings, data=skipping)):
        await has(bus, "TASKS", 4)
        assert [lease.prompt.content for lease in await leases(bus)] == ["2 + 2 =", "3 + 3 ="] * 2
        assert [lease.lease_id for lease in await leases(bus)] == [0, 2, 3, 5]


async def test_model_files_that_are_gone_are_waited_for(bus, tmp_path, model_files):
    """A learner that starts over replaces them."""
    await publish_policy(bus, BLOB)
    async with storage(bus, make_settings(tmp_path, "2 + 2 =")):
        await until(lambda: is_known(bus))
        await publish_policy(bus, await put_blob(bus, Publisher(bus), encode(model_files), "model"))
        await has(bus, "TASKS", 4)


async def test_second_storage_process_of_a_run_is_refused(bus, tmp_path, connect: Connect):
    settings = make_settings(tmp_path, "2 + 2 =")
    async with storage(bus, settings), connect("second") as other:
        await until(lambda: is_known(bus))
        with pytest.raises(ConfigError, match="run 'test' already has a dispatcher: process"):
            await run_storage(other, settings, asyncio.Event())
    async with storage(bus, settings):  # the first has left
        pass


async def test_other_number_of_shards_is_refused_and_changes_nothing(bus, tmp_path):
    async with storage(bus, make_settings(tmp_path, "2 + 2 =")):
        await until(lambda: is_known(bus))
    await bus.delete("run")
    with pytest.raises(ConfigError, match=r"in 2 shards: set replay\.shards = 2"):
        await run_storage(bus, make_settings(tmp_path, "2 + 2 =", shards=3), asyncio.Event())
    for stream, shard in (("TRAJECTORIES", "shard-0"), ("TRAJECTORIES-1", "shard-1")):
        consumers = await bus.js.consumers_info(bus.topology.stream(stream))
        assert [consumer.name for consumer in consumers] == [shard]
    assert "test-TRAJECTORIES-2" not in [info.config.name for info in await bus.js.streams_info()]
    assert not await is_known(bus)


async def test_replay_of_another_run_is_refused(bus, tmp_path):
    settings = make_settings(tmp_path, "2 + 2 =")
    store = ReplayStore.open(settings.run.replay(1))
    store.append([make_trajectory(5, sample) for sample in range(2)])
    store.close()
    with pytest.raises(ConfigError, match="holds the group of lease 5, but the ledger has issued only 0"):
        await run_storage(bus, settings, asyncio.Event())


async def test_leases_that_nobody_takes_are_said_until_an_actor_comes(
    bus, tmp_path, model_files, monkeypatch
):
    monkeypatch.setattr("storage.dispatch.absent_actors.ABSENT_S", 0.1)
    monkeypatch.setattr("storage.service.QUEUES_PERIOD_S", 0.05)
    heard: list[Status] = []
    await bus.listen(bus.subject("status", "storage"), Status, heard.append)
    await publish_policy(bus, await put_blob(bus, Publisher(bus), encode(model_files), "model"))
    async with storage(bus, make_settings(tmp_path, "2 + 2 =")):
        await until(lambda: bool(heard) and heard[-1].doing.startswith("no actors for 0 min: start `launch"))
        assert heard[-1].values["groups_waiting"] == 4
        assert await Inbox(bus, "TASKS", "rollout").take(1, 5.0)
        await until(lambda: heard[-1].values["groups_waiting"] == 3)
        await until(lambda: not heard[-1].doing.startswith("no actors"))


async def test_a_learner_is_told_of_actors_that_ended_and_that_none_comes(
    bus, tmp_path, model_files, monkeypatch
):
    monkeypatch.setattr("storage.dispatch.dispatcher.LONG_POLL_S", 0.05)
    waits: list[str] = []
    reader = ReplayReader(bus, "a")
    await publish_policy(bus, await put_blob(bus, Publisher(bus), encode(model_files), "model"))
    reason = "of the latest 64 rollouts, 64 failed by their reward"

    async def ended() -> None:
        lease = asyncio.create_task(reader.lease(1, 0, on_wait=waits.append))
        await until(lambda: bool(waits) and waits[-1].startswith(f"actor-1 ended: {reason}"))
        with monkeypatch.context() as patch:
            patch.setattr(absent_actors, "ENDS_AFTER_S", 0.1)
            with pytest.raises(NoActorsError, match=f"(?s)start .*: {reason}"):
                await lease

    with capture_logs() as logs:
        async with storage(bus, make_settings(tmp_path, "2 + 2 =")):
            await has(bus, "TASKS", 4)
            await report_end(bus, source="actor-1", look=lambda: (1, {}), reason=reason)
            await ended()
        waits.clear()
        async with storage(bus, make_settings(tmp_path, "2 + 2 =")):
            await ended()
            await send_groups(bus, [0, 1])
            lease = await reader.lease(1, 0, on_wait=waits.append)
            assert [group.lease_id for group in lease.groups] == [0, 1]  # what is there is trained on
    said = [line["reason"] for line in logs if line["event"] == "groups_do_not_come"]
    assert [one.partition("; ")[0] for one in said] == [f"actor-1 ended: {reason}"] * 2


async def test_status_accounts_for_every_group(bus, tmp_path, model_files):
    heard: list[Status] = []
    await bus.listen(bus.subject("status", "storage"), Status, heard.append)
    await publish_policy(bus, await put_blob(bus, Publisher(bus), encode(model_files), "model"))
    async with storage(bus, make_settings(tmp_path, "2 + 2 =")):
        await has(bus, "TASKS", 4)
        await send_groups(bus, [0, 1])
        assert await LearnerStandIn(bus).batch(1) == [0, 1]
        await send_groups(bus, [2])
        rejected = encode(GroupRejected(lease_id=3, reason="zero_variance"))
        await bus.js.publish(bus.subject("outcomes", "rejected"), rejected)
        await has(bus, "TASKS", 5)
        account = {"issued": 5, "rolling_out": 1, "rejected": 1, "stored": 1, "trained": 2}
        # once it has heard of both shards
        doing = "all that the staleness bound allows is rolling out or stored"
        await until(
            lambda: bool(heard) and account.items() <= heard[-1].values.items() and heard[-1].doing == doing
        )
    values = heard[-1].values
    assert values["reasons"] == {"zero_variance": 1}
    assert values["trajectories_stored"] == 6


async def test_poison_is_known_at_once_after_a_restart_and_counted_by_kind(bus, tmp_path, model_files):
    heard: list[Status] = []
    await bus.listen(bus.subject("status", "storage"), Status, heard.append)
    await publish_policy(bus, await put_blob(bus, Publisher(bus), encode(model_files), "model"))
    async with storage(bus, make_settings(tmp_path, "2 + 2 =")):
        await has(bus, "TASKS", 4)
    run = {lease.run for lease in await leases(bus)}
    assert len(run) == 1
    await publish_policy(bus, BLOB)  # the model's files cannot be read now
    async with storage(bus, make_settings(tmp_path, "2 + 2 =")):
        beyond = make_trajectory(0).token_ids + Qwen3Config().vocab_size
        await send(bus, replace(make_trajectory(0), token_ids=beyond))
        await send(bus, make_trajectory(1, policy_version=1))
        await send(bus, replace(make_trajectory(2), run="another"))
        await send(bus, *(replace(make_trajectory(3, n), run=run.pop() if n == 0 else "") for n in range(2)))
        await has(bus, "DEAD", 3)
        expected = {
            "dead": 3,
            "dead_reasons": {"vocabulary": 1, "version": 1, "identity": 1},
            "reasons": {"set_aside": 2},
            "trajectories_stored": 2,
        }  # each becomes known at a time of its own
        await until(lambda: expected.items() <= heard[-1].values.items())
    assert expected.items() <= heard[-1].values.items()


async def test_all_that_storage_does_beside_its_leases_is_started(bus, tmp_path):
    started: set[str] = set()

    def begin(loop, work, **kwargs):
        started.add(getattr(work, "__qualname__", ""))
        return asyncio.Task(work, loop=loop, **kwargs)

    asyncio.get_running_loop().set_task_factory(begin)
    async with storage(bus, make_settings(tmp_path, "2 + 2 =")):
        await until(lambda: started >= BESIDE)


async def test_keys_streams_and_heldout_prompts_that_the_bus_loses_come_back(bus, tmp_path, monkeypatch):
    for name in ("LOOK_AT_STREAMS_S", "LOOK_AT_KEYS_S"):
        monkeypatch.setattr(lost_data, name, 0.05)
    monkeypatch.setattr(updates, "LOOK_S", 0.05)
    heldout = write_prompts(tmp_path / "heldout.jsonl", "4 + 4 =")
    async with storage(bus, make_settings(tmp_path, "2 + 2 =", heldout=heldout)):
        await until(lambda: is_known(bus))
        [ref, _] = await bus.get("heldout", BlobRef)
        await bus.delete("identity")
        for stream in ("FILES", "DEAD"):
            await bus.js.delete_stream(bus.topology.stream(stream))

        async def all_back() -> bool:
            names = {found.config.name for found in await bus.js.streams_info()}
            there = {bus.topology.stream(stream) for stream in ("FILES", "DEAD")} <= names
            return there and await bus.get("identity", RunIdentity) is not None and await on_bus(bus, [ref])

        await until(all_back)
        [prompt] = decode(await get_blob(bus, ref), PromptSet).prompts
        assert prompt.content == "4 + 4 ="
