"""Each role of a secured run may do what it needs, and nothing that belongs to another."""

import asyncio
import json
import stat
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import nats.errors
import pytest
from nats.aio.client import Client
from nats.js.api import StreamConfig
from nats.js.errors import NotFoundError

from bus.config import BusConfig
from bus.connection import Bus, answers, client
from bus.connection.client import authentication
from bus.connection.reporting_rate import follow_pace
from bus.connection.roles import hold_role
from bus.errors import BusAwayError, BusError, ConfigError
from bus.messages import Pace, RoleHolder, Status
from bus.requests import Done, Waiting
from bus.security.credentials import load_credentials
from bus.security.permissions import COUNTERS, ROLES
from bus.server.nats_server import NatsServer, free_port
from bus.server.secure_directory import SecureDirectory
from bus.streams.blob_store import delete_blob, get_blob, put_blob
from bus.streams.consume import Inbox
from bus.streams.publish import Publisher
from bus.streams.stream_reader import StreamReader
from bus.topology import ensure
from tests.bus.security.secured import As, by_role, lasting_bus, make_streams, remove_streams

pytestmark = pytest.mark.nats
HOLDER = RoleHolder(incarnation="x", host="h", pid=1)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureDirectory]:
    """Credentials of the runs "mine" and "other", with the bus that they are for."""
    with lasting_bus(tmp_path_factory.mktemp("secured"), "mine", "other") as secure:
        yield secure


@pytest.fixture
async def as_role(keys: SecureDirectory) -> As:
    """Connect to run "mine", which its storage has made, as one of the roles."""
    connect = by_role(keys)
    await remove_streams(connect, "mine", "other")
    await make_streams(connect, shards=2)
    async with connect("storage") as bus:
        await bus.put("run", HOLDER)
    return connect


async def forbidden(bus: Bus, doing: Callable[[], Awaitable[object]]) -> bool:
    """Whether the server refuses what `doing` does: it says so to the client, and does nothing."""
    refusal = asyncio.Event()

    async def heard(error: Exception) -> None:
        if "permissions violation" in str(error).lower():
            refusal.set()

    bus.client._error_cb = heard  # the client has no other way to hear of it
    work = asyncio.ensure_future(doing())
    waiting = asyncio.create_task(refusal.wait())
    await asyncio.wait({work, waiting}, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    if not refusal.is_set():
        await bus.client.flush()  # the refusal comes before the answer to this
    for task in (work, waiting):
        task.cancel()
    await asyncio.gather(work, waiting, return_exceptions=True)
    return refusal.is_set()


FORBIDDEN_SUBJECTS = {
    "storage": ("access.a", "weights.policy.1.snapshot.0", "notice.policy", "outcomes.rewards.0",
                "trajectories.0", "broadcast.begin", "broadcast.end", "notice.snapshot"),
    "learner": ("trajectories.0", "tasks.rollout.1", "outcomes.rewards.0", "outcomes.rejected",
                "files.heldout.x.0", "rpc.data", "notice.pace", "broadcast.begin", "broadcast.end", "dead.x"),
    "actor": ("weights.policy.1.snapshot.0", "notice.policy", "files.model.x.0", "tasks.rollout.1",
              "outcomes.rewards.0", "rpc.batch", "rpc.committed", "rpc.data", "rpc.engines.other",
              "rpc.profile", "notice.pace"),
    "judge": ("weights.policy.1.snapshot.0", "trajectories.0", "outcomes.rejected", "tasks.rollout.1",
              "events.metrics", "rpc.lease", "notice.policy", "notice.pace", "dead.x", "access.a",
              "broadcast.begin"),
    "watcher": ("access.a", "trajectories.0", "outcomes.rewards.0", "events.metrics", "rpc.lease",
                "rpc.profile", "weights.x", "dead.x", "notice.pace", "tasks.rollout.1", "broadcast.begin"),
}  # fmt: skip


@pytest.mark.parametrize("role", [role for role in ROLES if role != "operator"])
async def test_role_publishes_nothing_that_is_not_its_own(role: str, as_role: As):
    async with as_role(role) as bus:
        api = [f"$JS.API.STREAM.DELETE.{bus.topology.stream('TASKS')}"]
        if role != "storage":
            api += ["$KV.sluice-mine.run", "$KV.sluice-mine.identity", "$JS.API.STREAM.CREATE.mine-TASKS"]
        if role != "learner":
            api += ["$KV.sluice-mine.policy", "$JS.API.STREAM.PURGE.mine-WEIGHTS"]
        subjects = [bus.subject(name) for name in FORBIDDEN_SUBJECTS[role]]
        allowed = [
            subject
            for subject in (*subjects, *api)
            if not await forbidden(bus, partial(bus.client.publish, subject, b"{}"))
        ]
        assert allowed == []


@pytest.mark.parametrize("role", [role for role in ROLES if role != "operator"])
async def test_role_hears_neither_the_answers_to_others_nor_everything(role: str, as_role: As):
    async with as_role(role) as bus:
        others = [f"_INBOX.mine.{other}.>" for other in ROLES if other != role]
        for subject in (">", "_INBOX.>", "$JS.>", "sluice.mine.>", *others):
            if (role, subject) == ("storage", "sluice.mine.>"):
                continue
            assert await forbidden(bus, lambda subject=subject: bus.client.subscribe(subject)), subject


ANSWERED_BY = {"learner": {"operator", "actor"}, "actor": {"operator"}, "judge": set(), "watcher": set()}


@pytest.mark.parametrize("role", ANSWERED_BY)
async def test_role_answers_only_those_whose_requests_it_serves(role: str, as_role: As):
    async with as_role(role) as bus:
        for asker in ROLES:
            subject = f"_INBOX.mine.{asker}.{'0' * 22}.{'1' * 22}"
            refused = await forbidden(bus, partial(bus.client.publish, subject, b"forged"))
            assert refused == (asker not in ANSWERED_BY[role]), asker


@pytest.mark.first(2, others=pytest.mark.slow)
@pytest.mark.parametrize("role", ["storage", "actor", "judge", "watcher"])
async def test_no_role_hears_what_readers_of_weights_ask_but_the_learner(role: str, as_role: As):
    async with as_role(role) as bus:
        for name in ("access.*", "access.a"):
            assert await forbidden(bus, lambda name=name: bus.client.subscribe(bus.subject(name))), name


async def test_storage_hears_actors_and_tells_them_the_pace(as_role: As):
    async with as_role("storage") as storage, as_role("actor") as actor, asyncio.timeout(60):
        heard = asyncio.Event()
        await storage.listen(storage.subject("status", "actor"), Status, lambda _: heard.set())
        await storage.put("pace", Pace(slower=2.0))
        await follow_pace(actor)
        assert actor.slower == 2
        await storage.client.flush()
        status = Status(source="a", role="actor", doing="waiting", pid=1, peak_rss_bytes=1)
        await actor.notify(actor.subject("status", "actor"), status)
        await heard.wait()
        await actor.client.flush()
        await storage.notify(storage.subject("notice", "pace"), Pace(slower=3.0))
        while actor.slower == 2:  # noqa: ASYNC110 - a notice has no event
            await asyncio.sleep(0.01)


async def test_run_is_written_by_storage_and_read_by_all(as_role: As):
    for role in ROLES:
        async with as_role(role) as bus:
            assert await bus.get("run", RoleHolder) is not None, role


async def test_runs_do_not_see_each_other(as_role: As):
    async with as_role("operator", "other") as other:
        assert await other.js.streams_info() == []
        heard = await other.client.subscribe(">")
        await other.client.flush()
        async with as_role("operator") as mine:
            await mine.client.publish("sluice.other.notice.policy", b"x")
            await mine.client.flush()
        await other.client.publish("last", b"")
        assert (await heard.next_msg(timeout=20)).subject == "last"


async def test_credentials_of_another_run_are_refused_with_the_run_that_they_are_for(keys: SecureDirectory):
    config = BusConfig(creds=keys.path / "mine/actor.creds")
    with pytest.raises(ConfigError, match="for run 'mine', not for 'other'"):
        async with Bus.connect(config, "other", name="x"):
            pass


async def test_nobody_gets_in_without_a_key(keys: SecureDirectory):
    tls = {key: value for key, value in authentication(load_credentials(keys.probe)).items() if "tls" in key}
    client, reasons = Client(), []

    async def heard(error: Exception) -> None:
        reasons.append(str(error).lower())

    with pytest.raises((nats.errors.Error, OSError)):
        await client.connect(
            load_credentials(keys.probe).url, allow_reconnect=False, connect_timeout=20, error_cb=heard, **tls
        )
    assert any("authorization" in reason for reason in reasons)


# asyncio leaves the transport of a TLS handshake open that is cancelled or refused.
@pytest.mark.filterwarnings("ignore:unclosed transport <asyncio._SSLProtocolTransport:ResourceWarning")
@pytest.mark.parametrize("attempt_s", [0.5, 10.0], ids=["client gives up first", "server gives up first"])
async def test_client_without_credentials_is_told_that_it_needs_them(
    keys: SecureDirectory, attempt_s: float, monkeypatch: pytest.MonkeyPatch
):
    patience = {**client._patience(), "connect_timeout": attempt_s}
    monkeypatch.setattr(client, "_patience", lambda: patience)
    for scheme, connect_timeout_s, kind in (
        ("nats:", 0.3, BusAwayError),  # it has not had time to find out
        ("nats:", 30, ConfigError),
        ("tls:", 30, ConfigError),
    ):
        url = load_credentials(keys.probe).url.replace("nats:", scheme)
        config = BusConfig(url=url, connect_timeout_s=connect_timeout_s)
        async with asyncio.timeout(60):
            with pytest.raises(kind, match="a bus with keys needs --creds"):
                async with Bus.connect(config, "mine", name="stranger"):
                    pass


async def test_credentials_are_for_a_bus_with_tls_and_for_no_other_such_bus(
    keys: SecureDirectory, tmp_path: Path
):
    creds = keys.path / "mine/actor.creds"
    others = SecureDirectory(tmp_path / "others")
    async with NatsServer(tmp_path / "plain") as plain:
        others.make(["mine"], "nats://127.0.0.1:1")
        async with NatsServer(tmp_path / "other", secure=others) as other:
            for url, message in ((plain.url, "speaks no TLS"), (other.url, "it is another bus")):
                async with asyncio.timeout(60):
                    with pytest.raises(ConfigError, match=message):
                        async with Bus.connect(BusConfig(url=url, creds=creds), "mine", name="x"):
                            pass


async def test_connecting_ends_in_time_though_the_client_forgets_that_it_was_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    select = Client._select_next_server

    async def forgetful(client: Client) -> None:
        try:
            await select(client)
        except asyncio.CancelledError:  # as `asyncio.wait_for` of Python 3.11 does
            await asyncio.sleep(3600)

    monkeypatch.setattr(Client, "_select_next_server", forgetful)
    config = BusConfig(url=f"nats://127.0.0.1:{free_port('127.0.0.1')}", connect_timeout_s=0.3)
    async with asyncio.timeout(60):
        with pytest.raises(BusAwayError):
            async with Bus.connect(config, "mine", name="x"):
                pass


async def test_server_says_nothing_before_tls(keys: SecureDirectory):
    port = int(load_credentials(keys.probe).url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"CONNECT {}\r\nPING\r\n")
    assert b"PONG" not in await asyncio.wait_for(reader.read(), 60)  # it ends the connection
    writer.close()


async def test_actor_takes_a_task_and_settles_it(as_role: As):
    async with as_role("storage") as storage, as_role("actor") as actor:
        await Publisher(storage).publish(storage.subject("tasks", "rollout", 7), b"task", message_id="7")
        [task] = await Inbox(actor, "TASKS", "rollout").take(1, 20.0)
        await task.in_progress()
        await task.ack_sync(timeout=20)
        subject = actor.subject("trajectories", 0)
        await Publisher(actor).publish(subject, b"trajectory", message_id="t")
        [stored] = await Inbox(storage, "TRAJECTORIES", "shard-0").take(1, 20.0)
        assert (task.data, stored.data) == (b"task", b"trajectory")
        await Publisher(actor).publish(actor.subject("trajectories", 1), b"other shard", message_id="o")
        [stored] = await Inbox(storage, "TRAJECTORIES-1", "shard-1").take(1, 20.0)
        assert stored.data == b"other shard"


@pytest.mark.parametrize("role", ["storage", "watcher"])
async def test_storage_and_watchers_read_events_that_are_past(role: str, as_role: As):
    async with as_role("actor") as actor, as_role(role) as reading:
        for number, subject in enumerate(("events.metrics", "events.evaluation", COUNTERS)):
            name = f"event-{number}"
            await Publisher(actor).publish(actor.subject(subject), name.encode(), message_id=name)
        found = await StreamReader(reading, "EVENTS", reading.subject("events", ">")).take(10)
        assert [message.data for message in found] == [b"event-0", b"event-1", b"event-2"]


@pytest.mark.first(2, others=pytest.mark.slow)
@pytest.mark.parametrize("role", ["learner", "actor", "judge", "watcher"])
async def test_only_storage_makes_consumers_of_events_or_removes_some(role: str, as_role: As):
    async with as_role(role) as bus:
        events = bus.topology.stream("EVENTS")
        reads = [] if role == "watcher" else [f"$JS.API.DIRECT.GET.{events}"]
        api = [f"$JS.API.CONSUMER.CREATE.{events}.x", f"$JS.API.STREAM.PURGE.{events}", *reads]
        for subject in api:
            assert await forbidden(bus, partial(bus.client.publish, subject, b"{}")), subject


async def answered(ask: Callable[[], Awaitable[object]]) -> object:
    """Return the answer as soon as the server knows who serves."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await ask()
            except BusError as error:
                if "nobody serves" not in str(error):
                    raise


async def test_requests_are_answered_across_roles(as_role: As):
    async def done(_: Done) -> list[Done]:
        return [Done()]

    for server, asker, subject in (
        ("storage", "actor", "rpc.lease"),
        ("storage", "learner", "rpc.batch"),
        ("learner", "actor", "broadcast.wanted"),
        ("learner", "actor", "access.a"),
        ("actor", "operator", "rpc.engines.a"),
        ("learner", "operator", "rpc.profile"),
    ):
        async with as_role(server) as serving, as_role(asker) as asking:
            await serving.serve(serving.subject(subject), Done, done)
            ask = partial(asking.request, asking.subject(subject), Done(), Done, timeout_s=20)
            assert await answered(ask) == Done()
            assert await ask() == Done()


async def test_long_answers_go_across_roles(as_role: As, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(answers, "WINDOW_BYTES", 10_000)
    parts = [Waiting(reason="x" * 3000)] * 20

    async def many(_: Done) -> list[Waiting | Done]:
        return [*parts, Done()]

    for server, asker, subject in (
        ("storage", "learner", "rpc.read.0"),
        ("storage", "watcher", "rpc.read.0"),
        ("learner", "actor", "broadcast.wanted"),
    ):
        async with as_role(server) as serving, as_role(asker) as asking:
            await serving.serve(serving.subject(subject), Done, many)
            ask = partial(asking.request_many, asking.subject(subject), Done(), Waiting, timeout_s=20)
            assert await answered(ask) == parts


async def test_learner_publishes_weights_that_an_actor_reads(as_role: As):
    async with as_role("learner") as learner, as_role("actor") as actor:
        ref = await put_blob(learner, Publisher(learner), b"weights", "policy", stream="weights")
        assert await get_blob(actor, ref) == b"weights"
        await learner.put("policy", HOLDER)
        await delete_blob(learner, ref)
        with pytest.raises(BusError):
            await get_blob(actor, ref)


async def test_actor_claims_a_server_and_holds_no_other_role(as_role: As):
    async with as_role("actor") as actor:
        async with hold_role(actor, "engine.a1", "actor-1"):
            assert await actor.get("role.engine.a1", RoleHolder) is not None
        assert await actor.get("role.engine.a1", RoleHolder) is None
        for role in ("learner", "dispatcher", "shard-0"):
            key = f"$KV.sluice-mine.role.{role}"
            assert await forbidden(actor, partial(actor.client.publish, key, b"{}")), role


async def test_judge_gives_a_reward(as_role: As):
    async with as_role("judge") as judge, as_role("storage") as storage:
        subject = judge.subject("outcomes", "rewards", 1)
        await Publisher(judge).publish(subject, b"reward", message_id="r")
        [reward] = await Inbox(storage, "OUTCOMES", "rewards-1").take(1, 20.0)
        assert reward.data == b"reward"


async def test_operator_does_what_the_other_roles_do(as_role: As):
    """It gives and takes tasks, trajectories, weights and rewards, and sets and removes every key."""
    async with as_role("operator") as bus:
        for stream, durable, names in (
            ("TASKS", "rollout", ("tasks", "rollout", 7)),
            ("TRAJECTORIES", "shard-0", ("trajectories", 0)),
            ("TRAJECTORIES-1", "shard-1", ("trajectories", 1)),
            ("OUTCOMES", "rewards-1", ("outcomes", "rewards", 1)),
        ):
            await Publisher(bus).publish(bus.subject(*names), b"x", message_id=durable)
            [taken] = await Inbox(bus, stream, durable).take(1, 20.0)
            await taken.ack_sync(timeout=20)
        ref = await put_blob(bus, Publisher(bus), b"weights", "policy", stream="weights")
        assert await get_blob(bus, ref) == b"weights"
        await delete_blob(bus, ref)
        async with hold_role(bus, "learner", "restored"):
            pass
        for key in ("run", "policy"):
            await bus.put(key, HOLDER)
            await bus.delete(key)
            assert await bus.get(key, RoleHolder) is None
        heard = await bus.client.subscribe("sluice.mine.>")
        async with as_role("learner") as learner:
            await learner.notify(learner.subject("notice", "policy"), HOLDER)
            assert (await heard.next_msg(timeout=20)).subject == "sluice.mine.notice.policy"


async def test_operator_of_a_run_does_nothing_to_other_runs_or_to_the_server(as_role: As):
    async with as_role("operator", "other") as other:
        await ensure(other.js, other.topology, shards=1)
        await other.create_keys()
        await other.put("run", HOLDER)
        async with as_role("operator") as mine:
            for name in ("other-TASKS", "KV_sluice-other"):
                with pytest.raises(NotFoundError):
                    await mine.js.delete_stream(name)
            assert all(info.config.name.find("other") < 0 for info in await mine.js.streams_info())
            await mine.client.publish("$KV.sluice-other.run", b"x")
            await mine.client.flush()
            for request in (
                "$SYS.REQ.SERVER.PING",
                "$SYS.REQ.SERVER.PING.JSZ",
                "$SYS.REQ.ACCOUNT.other.CONNZ",
            ):
                with pytest.raises(nats.errors.Error):  # nobody answers
                    await mine.client.request(f"$SYS.REQ.{request}", b"", timeout=0.5)
            seen = await mine.client.request("$SYS.REQ.ACCOUNT.PING.CONNZ", b"", timeout=20)
            assert len(json.loads(seen.data)["data"]["connections"]) == 1, (
                "its own, and none of the other run"
            )
        found = await other.get("run", RoleHolder)
        assert found is not None
        assert found[0] == HOLDER
        assert len(await other.js.streams_info()) == 8


async def test_watcher_sees_how_a_run_is_and_takes_nothing_from_it(as_role: As):
    async def done(_: Done) -> list[Done]:
        return [Done()]

    async with as_role("storage") as storage, as_role("watcher") as watcher:
        await Publisher(storage).publish(storage.subject("tasks", "rollout", 7), b"task", message_id="7")
        for subject in ("rpc.step_groups", "rpc.stored.0"):
            await storage.serve(storage.subject(subject), Done, done)
            ask = partial(watcher.request, watcher.subject(subject), Done(), Done, timeout_s=20)
            assert await answered(ask) == Done()
        ref = await put_blob(storage, Publisher(storage), b"tokenizer", "heldout")
        assert await get_blob(watcher, ref) == b"tokenizer"
        assert (await watcher.js.stream_info("mine-TASKS")).state.messages == 1
        assert (await watcher.js.consumer_info("mine-TASKS", "rollout")).num_pending == 1
        for api in (
            "STREAM.MSG.GET.mine-TASKS", "CONSUMER.MSG.NEXT.mine-TASKS.rollout", "STREAM.PURGE.mine-EVENTS",
            "CONSUMER.CREATE.mine-EVENTS.x",
        ):  # fmt: skip
            assert await forbidden(watcher, partial(watcher.client.publish, f"$JS.API.{api}", b"{}")), api


async def test_operator_deletes_a_stream(as_role: As):
    async with as_role("operator") as bus:
        await bus.js.delete_stream(bus.topology.stream("DEAD"))
        await bus.js.add_stream(StreamConfig(name="anything", subjects=["anything"]))


def made(directory: Path, *runs: str) -> SecureDirectory:
    """Credentials that a test may change."""
    secure = SecureDirectory(directory / "keys")
    secure.make(runs, "nats://here:1")
    return secure


def test_files_are_the_owners_alone_and_a_second_start_keeps_the_keys(tmp_path: Path):
    keys = made(tmp_path, "mine", "other")
    files = [path for path in keys.path.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    before = load_credentials(keys.path / "mine/actor.creds")
    keys.make(["third"], "nats://elsewhere:1")
    after = load_credentials(keys.path / "mine/actor.creds")
    assert (after.seed, after.authority, after.url) == (before.seed, before.authority, "nats://elsewhere:1")
    assert keys.runs == ["mine", "other", "third"]
    assert before.seed not in repr(before)


def test_a_file_that_others_may_read_is_refused_without_its_content(tmp_path: Path):
    path = made(tmp_path, "mine").path / "mine/actor.creds"
    seed = load_credentials(path).seed
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600") as refused:
        load_credentials(path)
    path.chmod(0o600)
    path.write_text(f'{{"seed": "{seed}"}}')
    with pytest.raises(ConfigError, match="holds no credentials") as damaged:
        load_credentials(path)
    assert seed not in f"{refused.value}{damaged.value}{damaged.value.__cause__}"
