"""On a secured bus forged, old and erased records change nothing: they are set aside, and come back.

Forgeries are written by an operator's bare client, which may write everything: as if nothing else held."""

import asyncio
import base64
import json
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from bus.codec import decode, encode
from bus.config import BusConfig
from bus.connection import key_bucket
from bus.connection.bus import Bus
from bus.connection.roles import hold_role
from bus.connection.status import Activity, report_status
from bus.errors import BusError, ConfigError
from bus.messages import Metrics, Pace, RoleHolder, RunRecord, Status
from bus.requests import Done
from bus.security.credentials import load_credentials
from bus.security.role_keys import RoleKeys, public_key
from bus.security.signatures import Signatures
from bus.server.nats_server import NatsServer
from bus.server.secure_directory import SecureDirectory
from bus.streams import lost_data
from bus.streams.consume import Inbox, consume
from bus.streams.lost_data import OwnRecords
from bus.streams.publish import Publisher
from launch.services.bus import follow_directory
from tests.bus.security.forgeries import forgeries
from tests.bus.security.secured import As, by_role, make_streams, secured_bus

pytestmark = pytest.mark.nats
FORGED = 10_000
NOTICES = 5_000
TASKS = 500
"""Forgeries among them that are notices, and that are tasks on a stream."""
PACE = Pace(slower=2.0)


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[tuple[SecureDirectory, NatsServer]]:
    async with secured_bus(tmp_path, "mine", "other") as made:
        yield made


@pytest.fixture
async def as_role(secured: tuple[SecureDirectory, NatsServer], monkeypatch: pytest.MonkeyPatch) -> As:
    monkeypatch.setattr(lost_data, "LOOK_AT_KEYS_S", 0.1)
    monkeypatch.setattr(key_bucket, "LOOK_S", 0.2)
    connect = by_role(secured[0])
    await make_streams(connect)
    return connect


def record(settings: str) -> RunRecord:
    return RunRecord(name="mine", config_json=settings)


async def until(found: Callable[[], object], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not found():  # noqa: ASYNC110 - what other processes do has no event
            await asyncio.sleep(0.02)


async def until_held(bus: Bus, key: str, message: RunRecord | RoleHolder | Pace) -> None:
    """Return when `message` is what lies under the key."""
    async with asyncio.timeout(60):
        while not await bus.holds(key, message):  # noqa: ASYNC110 - what other processes do has no event
            await asyncio.sleep(0.02)


async def put_raw(bus: Bus, key: str, data: bytes) -> None:
    await bus.js.publish(f"$KV.{bus.topology.bucket}.{key}", data)


@pytest.mark.slow
async def test_ten_thousand_forged_records_are_acted_on_by_nobody(
    as_role: As, secured: tuple[SecureDirectory, NatsServer]
):
    """Ten thousand notices, requests, tasks and keys: what listens, serves and reads goes on."""

    def by(role: str, run: str = "mine") -> Signatures:
        path = secured[0].files(run).creds(role)
        return Signatures(load_credentials(path), path)

    handled: list[object] = []

    async def serve(request: Pace) -> list[Done]:
        handled.append(request)
        return [Done()]

    async def take(task: Pace) -> None:
        handled.append(task)

    async with (
        as_role("storage") as storage,
        as_role("learner") as learner,
        as_role("actor") as actor,
        as_role("operator") as enemy,
    ):
        await actor.listen(actor.subject("notice", "policy"), Pace, handled.append)
        await storage.serve(storage.subject("rpc", "resumed"), Pace, serve)
        stop = asyncio.Event()
        inbox = Inbox(actor, "TASKS", "evaluation")
        taking = asyncio.create_task(consume(inbox, actor, Pace, take, stop=stop, concurrency=4))
        await learner.put("policy", PACE)
        assert await actor.get("policy", Pace) is not None
        draw = random.Random(3)
        targets = {
            "policy": (learner.subject("notice", "policy"), NOTICES),
            "rpc.resumed": (learner.subject("rpc", "resumed"), FORGED - NOTICES - TASKS),
            "tasks.evaluation": (learner.subject("tasks", "evaluation"), TASKS),
        }
        sent = 0
        for name, (subject, count) in targets.items():
            writing = by("learner")
            old, newest = (writing.sealed(name, encode(Pace(slower=n))) for n in (5.0, 6.0))
            forge = forgeries(newest, old, by, name)[1:]  # old ones are another test's
            for n in range(count):
                data = forge[n % len(forge)](draw)
                if data == newest:
                    continue
                sent += 1
                await enemy.client.publish(subject, data, reply=enemy.client.new_inbox())
        await enemy.client.flush(timeout=60)
        for n in range(100):
            await put_raw(enemy, "policy", forge[n % len(forge)](draw))
            assert await actor.get("policy", Pace) is None
        assert await learner.swap("policy", PACE, 0) is not None
        assert await actor.get("policy", Pace) is not None
        reply = await learner.request(learner.subject("rpc", "resumed"), PACE, Done, timeout_s=30)
        await learner.notify(learner.subject("notice", "policy"), PACE)
        subject = learner.subject("tasks", "evaluation")
        await Publisher(learner).publish(subject, learner.sealed(subject, PACE), message_id="genuine")
        await until(lambda: len(handled) >= 3, 100)
        stop.set()
        await taking
    assert sent > 0.95 * (FORGED - 100)
    assert reply == Done()
    assert handled == [PACE] * 3
    assert actor.signatures is not None
    assert actor.signatures.set_aside["policy"] >= NOTICES * 0.9
    assert "forged or old records set aside" in actor.signatures.complaint()


async def test_record_that_somebody_overwrites_or_erases_comes_back_from_its_owner(as_role: As):
    stop, genuine = asyncio.Event(), record("{}")
    async with as_role("storage") as storage, as_role("actor") as actor, as_role("operator") as enemy:
        own = OwnRecords(storage)
        for key in ("run", "identity", "heldout", "heldout.set"):
            await own.put(key, genuine)
        keeping = asyncio.create_task(own.keep(stop))
        forged = [b"garbage", b"", encode(record("forged"))]
        for data in forged:
            await put_raw(enemy, "run", data)
            assert await actor.get_settled("run", RunRecord) is not None
        rolled_up = {"Nats-Rollup": "all"}
        await enemy.client.publish("$KV.sluice-mine.role.engine.x", b"", headers=rolled_up)
        await enemy.client.flush()
        for key in ("run", "identity", "heldout", "heldout.set"):
            await until_held(actor, key, genuine)
        await enemy.js.delete_stream("KV_sluice-mine")
        for key in ("run", "identity", "heldout", "heldout.set"):
            await until_held(actor, key, genuine)
        assert not keeping.done()
        stop.set()
        await keeping


async def test_old_record_that_is_put_back_is_set_aside_and_replaced(as_role: As):
    stop, key = asyncio.Event(), "$KV.sluice-mine.run"
    async with as_role("storage") as storage, as_role("actor") as actor, as_role("operator") as enemy:
        own = OwnRecords(storage)
        await own.put("run", record("old"))
        old = (await enemy.js.get_last_msg("KV_sluice-mine", key)).data
        await own.put("run", record("new"))
        assert await actor.holds("run", record("new"))
        await put_raw(enemy, "run", old)
        assert await actor.get("run", RunRecord) is None
        keeping = asyncio.create_task(own.keep(stop))
        await until_held(actor, "run", record("new"))
        stop.set()
        await keeping


async def test_record_whose_next_version_is_taken_while_it_is_read_is_no_old_one(
    as_role: As, monkeypatch: pytest.MonkeyPatch
):
    later = Pace(slower=3.0)
    async with as_role("storage") as storage, as_role("actor") as actor:
        await storage.put("pace", PACE)
        read = actor._keys._read

        async def overtaken(key: str) -> tuple[bytes | None, int]:
            found = await read(key)
            monkeypatch.undo()
            await storage.put("pace", later)
            assert await actor.holds("pace", later)
            return found

        monkeypatch.setattr(actor._keys, "_read", overtaken)
        assert await actor.holds("pace", later)
        assert actor.signatures.set_aside.total() == 0


async def test_role_is_kept_by_its_holder_over_a_forged_claim(as_role: As):
    async with (
        as_role("learner") as learner,
        as_role("learner") as second,
        as_role("operator") as enemy,
        hold_role(learner, "learner", "a") as holding,
    ):
        await put_raw(enemy, "role.learner", encode(RoleHolder(incarnation="enemy", host="far", pid=1)))
        with pytest.raises(ConfigError, match="already has a learner"):
            async with hold_role(second, "learner", "b"):
                pass
        found = await second.get_settled("role.learner", RoleHolder)
        assert found is not None
        assert found[0].incarnation == "a"
        assert not holding.done()


async def test_what_was_set_aside_stands_in_the_status_of_a_process(as_role: As):
    heard: list[Status] = []
    stop = asyncio.Event()
    async with as_role("actor") as actor, as_role("watcher") as watcher, as_role("operator") as enemy:
        await watcher.listen(watcher.subject("status", "actor"), Status, heard.append)
        await watcher.client.flush()
        await put_raw(enemy, "policy", b"forged")
        for _ in range(3):  # it is one record, however often it is read
            assert await actor.get("policy", Pace) is None
        stop.set()
        await report_status(actor, source="a", role="actor", look=lambda: Activity("rolling out"), stop=stop)
        await until(lambda: heard)
    assert heard[0].doing == "forged or old records set aside: 1 of 'policy'; rolling out"
    assert heard[0].values == {"records_set_aside": 1}


async def test_removed_key_is_absent_until_it_is_set_again(as_role: As):
    async with as_role("storage") as storage, as_role("actor") as actor:
        await storage.put("run", record("{}"))
        await storage.delete("run")
        assert await actor.get("run", RunRecord) is None
        assert await storage.swap("run", record("again"), 0) is not None
        assert await storage.swap("run", record("twice"), 0) is None
        assert await actor.holds("run", record("again"))


async def test_command_of_another_role_is_refused_by_name(as_role: As):
    async def serve(_: Pace) -> list[Done]:
        return [Done()]

    async with as_role("storage") as storage, as_role("operator") as operator:
        await storage.serve(storage.subject("rpc", "data"), Pace, serve)
        subject = operator.subject("rpc", "data")
        await storage.client.flush()
        assert await operator.request(subject, PACE, Done, timeout_s=20) == Done()
        with pytest.raises(BusError, match=r"rpc\.data is signed by storage, which may not write it"):
            await storage.request(subject, PACE, Done, timeout_s=20)


# --- keys are exchanged while the run goes on ---


async def test_key_of_a_role_is_rotated_and_revoked_while_the_run_goes_on(
    as_role: As, secured: tuple[SecureDirectory, NatsServer], tmp_path: Path
):
    """A thief with the old file is cut off; the learner goes on with the same connection object."""
    keys, server = secured
    files, stop = keys.files("mine"), asyncio.Event()
    stolen = tmp_path / "stolen.creds"
    stolen.write_bytes(files.creds("learner").read_bytes())
    stolen.chmod(0o600)
    thief = Signatures(load_credentials(stolen), stolen)
    following = asyncio.create_task(follow_directory(server, keys, stop))
    async with as_role("storage") as storage, as_role("learner") as learner, as_role("actor") as actor:
        await learner.put("policy", Pace(slower=2.0))
        assert await actor.get("policy", Pace) is not None
        connected = learner.client.stats["reconnects"]
        files.rotate("learner")
        await until(lambda: all(len(_keys(bus).of("learner")) == 2 for bus in (storage, learner, actor)))
        await learner.put("policy", Pace(slower=3.0))
        assert await actor.holds("policy", Pace(slower=3.0))
        assert learner.client.stats["reconnects"] == connected, "the key before is still let in"
        files.revoke("learner")
        newest = public_key(load_credentials(files.creds("learner")).seed)
        await until(lambda: all(_keys(bus).of("learner") == (newest,) for bus in (storage, actor)))
        await until(lambda: learner.client.stats["reconnects"] > connected and learner.client.is_connected)
        await learner.put("policy", Pace(slower=4.0))
        assert await actor.holds("policy", Pace(slower=4.0))
        async with as_role("operator") as enemy:
            await put_raw(enemy, "policy", thief.sealed("policy", encode(Pace(slower=9.0))))
            assert await actor.get("policy", Pace) is None
        with pytest.raises(ConfigError, match=r"(?i)authorization"):
            await connect_with(stolen)
        stop.set()
        await following


async def connect_with(path: Path) -> None:
    config = BusConfig(url=load_credentials(path).url, creds=path, connect_timeout_s=5)
    async with Bus.connect(config, "mine", name="thief"):
        pass


def _keys(bus: Bus) -> RoleKeys:
    assert bus.signatures is not None
    return bus.signatures.keys


async def test_list_of_keys_that_is_erased_or_forged_comes_back(
    as_role: As, secured: tuple[SecureDirectory, NatsServer]
):
    files = secured[0].files("mine")
    before = files.creds("actor").read_bytes()
    files.rotate("judge")
    newest = files.keys.revision
    async with as_role("storage"), as_role("operator") as enemy:
        for data in (b"", b"garbage", list_in(before)):
            await put_raw(enemy, "keys", data)
            files.creds("actor").write_bytes(before)  # a host that has an older file
            async with as_role("actor") as actor:
                await until(lambda actor=actor: _keys(actor).revision == newest)


def list_in(creds: bytes) -> bytes:
    """Return the list of keys in a credentials file."""
    return base64.b64decode(json.loads(creds)["role_keys"])


async def test_notices_without_a_record_need_no_signature(as_role: As):
    heard: list[Metrics] = []
    async with as_role("actor") as actor, as_role("watcher") as watcher:
        await watcher.listen(watcher.subject("events", "metrics"), Metrics, heard.append)
        await watcher.client.flush()
        sent = Metrics(source="a", step=1, time_s=0.0, values={})
        await actor.notify(actor.subject("events", "metrics"), sent)
        await until(lambda: heard)
    assert heard == [sent]
    assert decode(encode(sent), Metrics) == sent
