"""An enemy with the credentials of one role: all that it may send, and what the streams of a run hold."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from random import Random
from typing import TypeGuard

import nats.errors
from nats.aio.client import Client
from nats.js.api import StreamConfig
from nats.js.errors import NotFoundError

from bus.config import BusConfig, StreamsConfig
from bus.connection import Bus
from bus.connection.client import authentication
from bus.errors import BusError
from bus.security.credentials import Credentials, load_credentials
from bus.security.permissions import permissions
from bus.security.record_rules import ROLE_KEYS
from bus.security.stream_access import StreamAccess
from bus.server.secure_directory import SecureDirectory
from bus.topology import Topology, ensure

RUN = "mine"
AT_ONCE = 100
"""Messages that are read at a time."""
KEYS = (
    *("run", "identity", "policy", "heldout", "heldout.x", "pace", "role.learner", "role.engine.a"),
    *("device", "device-users.a", "engine-nodes.a", ROLE_KEYS),
)
SUBJECTS = (
    *("tasks.rollout.1", "tasks.evaluation", "trajectories.0", "outcomes.rejected", "outcomes.rewards.0"),
    *("weights.policy.1.0", "files.heldout.x.0", "files.model.x.0", "events.metrics", "events.evaluation"),
    "dead.x",
)
MESSAGE_ID = "an-id-that-others-use"
FORGED_INFO = json.dumps({"acc": f"run-{RUN}", "svc": f"run-{RUN}", "user": "storage", "name": "x"})
POLICY = f"$KV.sluice-{RUN}.policy"
VERBS = (
    *(
        "STREAM.PURGE",
        "STREAM.DELETE",
        "STREAM.MSG.DELETE",
        "STREAM.MSG.GET",
        "STREAM.RESTORE",
        "STREAM.UPDATE",
    ),
    *("STREAM.SNAPSHOT", "STREAM.LEADER.STEPDOWN", "DIRECT.GET", "CONSUMER.CREATE"),
)
HEADERS: tuple[dict[str, str], ...] = (
    {"Nats-Rollup": "all"},
    {"Nats-Rollup": "sub"},
    {"Nats-Rollup": "all", "KV-Operation": "PURGE"},
    {"KV-Operation": "DEL"},
    {"Nats-Msg-Id": MESSAGE_ID},
    {"Nats-Expected-Stream": "x"},
    {"Nats-Expected-Last-Sequence": "0"},
    {"Nats-Expected-Last-Subject-Sequence": "0"},
    {"Nats-Expected-Last-Subject-Sequence": "1", "Nats-Expected-Last-Subject-Sequence-Subject": POLICY},
    {"Nats-Expected-Last-Msg-Id": MESSAGE_ID},
    {"Nats-TTL": "1s"},
    {"Nats-Incr": "+1"},
    {"Nats-Incr": "+1", "Nats-Counter-Sources": "{}"},
    {"Nats-Batch-Id": "b", "Nats-Batch-Sequence": "1", "Nats-Batch-Commit": "1"},
    {"Nats-Schedule": "@at 2009-11-10T23:00:00Z", "Nats-Schedule-Target": POLICY},
    {"Nats-Schedule": "@every 1s", "Nats-Schedule-Target": POLICY, "Nats-Schedule-TTL": "1s"},
    {"Nats-Schedule": "@every 1s", "Nats-Schedule-Source": POLICY, "Nats-Schedule-Target": "x",
     "Nats-Schedule-Rollup": "sub", "Nats-Schedule-Time-Zone": "UTC"},
    {"Nats-Scheduler": POLICY, "Nats-Schedule-Next": "purge"},
    {"Nats-Marker-Reason": "Purge"},
    {"Nats-Stream-Source": "x 1 > >"},
    {"Nats-Request-Info": FORGED_INFO},
    {"Nats-Trace-Dest": POLICY},
    {"Nats-Trace-Dest": POLICY, "Nats-Trace-Only": "true"},
    {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
    {"Nats-Required-Api-Level": "0"},
    {"Status": "100", "Nats-Consumer-Stalled": POLICY},
    {"Nats-Last-Consumer": "1", "Nats-Last-Stream": "1", "Nats-Msg-Size": "0", "Nats-Response-Type": "x"},
)  # fmt: skip
"""Every header that nats-server 2.15 reads (its stream.go, client.go, msgtrace.go), with a harmful value."""


def replies(access: StreamAccess) -> tuple[str, ...]:
    """Return where an enemy asks for answers: keys, streams, JetStream's API, and ways that are another's."""
    topology, stored = Topology(RUN), stored_subjects()
    api = [
        f"$JS.API.STREAM.{verb}.{stream}"
        for verb, stream in product(
            ("PURGE", "DELETE"), (topology.stream("WEIGHTS"), f"KV_{topology.bucket}")
        )
    ]
    acks = [f"$JS.ACK.{topology.stream('TASKS')}.rollout.1.1.1.1.0", f"$JS.ACK.{RUN}"]
    guesses = ("stored.storage.", f"stored.learner.{'0' * 48}.", "stored.*.*.", "stored.>")
    others = [f"{guess}{subject}" for guess in guesses for subject in stored[:3]]
    processes = [topology.subject(name) for name in ("rpc.data", "notice.policy", "status.learner")]
    servers = [
        f"_INBOX.{RUN}.learner.x",
        "_R_.AAAAAA.BBBBBB",
        "_GR_.a.b.x",
        "$SYS.REQ.SERVER.PING",
        "$MQTT.sub.x",
    ]
    own = [f"{access.prefix}{subject}" for subject in stored]
    return *stored, *api, *acks, *others, *processes, *servers, *own


def payloads(subject: str) -> tuple[bytes, ...]:
    """Return what is sent on `subject`: of the API's requests, one that is answered."""
    if "STREAM.MSG.GET" in subject or "DIRECT.GET" in subject:
        by_subject = json.dumps({"last_by_subj": f"$KV.sluice-{RUN}.run"}).encode()
        return (b'{"seq": 1}', b'{"seq": 1, "batch": 3, "next_by_subj": ">"}', by_subject)
    if "CONSUMER.MSG.NEXT" in subject:
        return (b'{"batch": 3, "no_wait": true}', b"1")
    return (b"{}",) if subject.startswith("$JS.API") else (b"forged",)


def instance(pattern: str) -> str:
    """Return a subject that `pattern` allows, one that exists where there is one."""
    found = next((subject for subject in stored_subjects() if matches(pattern, subject)), None)
    return found or pattern.replace("*", "x").replace(">", "x.x")


def matches(pattern: str, subject: str) -> bool:
    """Return whether a subject is one of those that a pattern of nats-server names."""
    wanted, given = pattern.split("."), subject.split(".")
    for n, token in enumerate(wanted):
        if token == ">":
            return len(given) > n
        if n >= len(given) or token not in ("*", given[n]):
            return False
    return len(wanted) == len(given)


@dataclass(frozen=True)
class Sent:
    """One message of an enemy."""

    subject: str
    payload: bytes
    reply: str = ""
    headers: tuple[tuple[str, str], ...] = ()


def everything(credentials: Credentials) -> Iterator[Sent]:
    """Yield every request that a role may send, with every reply, and with every header."""
    access = StreamAccess.of(credentials)
    allowed = permissions(RUN, credentials.role)
    ways = [f"{access.prefix}{instance(subject)}" for subject in allowed.stored]
    ways += [instance(subject) for subject in allowed.publish]
    for subject in ways:
        bare = subject.removeprefix(access.prefix)
        for payload in payloads(bare):
            for reply in replies(access):
                yield Sent(subject, payload, reply)
        for headers in HEADERS:
            yield Sent(subject, payloads(bare)[0], "", tuple(headers.items()))
            yield Sent(
                subject, payloads(bare)[0], f"_INBOX.{RUN}.{credentials.role}.x", tuple(headers.items())
            )


def anything(credentials: Credentials, random: Random, count: int) -> Iterator[Sent]:
    """Yield requests at random, also such as the role may not send, with several headers and any reply."""
    access, topology = StreamAccess.of(credentials), Topology(RUN)
    streams = [str(config.name) for config in topology.streams(2)] + [f"KV_{topology.bucket}"]
    allowed = [instance(pattern) for pattern in permissions(RUN, credentials.role).stored]
    forbidden = [*stored_subjects(), *(f"$JS.API.{verb}.{stream}" for verb in VERBS for stream in streams)]
    beginnings = (access.prefix, access.prefix, "", "stored.", "_R_.", "$JS.API.")
    pushed = {"stream_name": topology.stream("EVENTS"), "config": {"deliver_subject": POLICY}}
    bodies = (b"", b"{}", b"+ACK", b"+TERM", b"+NXT", b'{"seq": 1}', b'{"filter": ">"}', b"forged")
    bodies = (*bodies, json.dumps(pushed).encode())
    targets = replies(access)
    for _ in range(count):
        subject = random.choice(beginnings) + random.choice(random.choice((allowed, forbidden)))
        body = random.choice((*bodies, *payloads(subject)))
        headers = {
            name: value for one in random.sample(HEADERS, random.randrange(4)) for name, value in one.items()
        }
        reply = random.choice(("", *targets))
        yield Sent(subject, body, reply, tuple(headers.items()))


@asynccontextmanager
async def enemy(credentials: Credentials) -> AsyncIterator[Client]:
    """Connect with plain nats-py: nothing of ours keeps it from anything."""
    client = Client()

    async def note(_: Exception) -> None:
        """The server's refusals are what is hoped for."""

    await client.connect(
        credentials.url.split(","), error_cb=note, pending_size=64 << 20, max_reconnect_attempts=-1,
        reconnect_time_wait=0.05, **authentication(credentials),
    )  # fmt: skip
    try:
        yield client
    finally:
        await client.close()


async def send(client: Client, messages: Iterable[Sent]) -> None:
    """Send all, over one connection."""
    for count, message in enumerate(messages):
        await client.publish(message.subject, message.payload, message.reply, dict(message.headers) or None)
        if count % 200 == 0:
            await client.flush(timeout=30)
    await client.flush(timeout=30)
    assert client.stats["reconnects"] == 0, "the server ended the connection: it has not seen all"


async def settle(client: Client, credentials: Credentials) -> None:
    """Return when JetStream has worked on what the enemy asked before: it answers its later requests."""
    access = StreamAccess.of(credentials)
    for pattern in permissions(RUN, credentials.role).stored:
        subject = instance(pattern)
        if ".STREAM.INFO." in subject or ".MSG.GET." in subject or ".DIRECT.GET." in subject:
            for _ in range(3):  # several workers of the server take requests from one queue
                await client.request(f"{access.prefix}{subject}", payloads(subject)[0], timeout=30)


Message = tuple[str, str, int, str]
"""Stream, subject, sequence and digest of a stored message."""


@dataclass(frozen=True)
class Contents:
    """All that the streams of a run hold."""

    messages: frozenset[Message]
    consumers: frozenset[tuple[str, str, str]]
    """Stream, name and place of each."""
    settings: str
    """Settings of all streams and consumers."""

    def foreign_to(self, role: str) -> "Contents":
        """Return what `role` may not change: messages on subjects that it may not write, of streams that it
        may not purge, and the places of consumers that it may not acknowledge for."""
        own = permissions(RUN, role).stored
        purged = {subject.split(".")[-1] for subject in own if ".STREAM.PURGE." in subject}
        kept = (one for one in self.messages if one[0] not in purged)
        messages = (one for one in kept if not any(matches(subject, one[1]) for subject in own))
        acked = {subject.split(".")[2] for subject in own if subject.startswith("$JS.ACK.")}
        consumers = (one for one in self.consumers if one[0] not in acked)
        return Contents(frozenset(messages), frozenset(consumers), self.settings)


async def contents(bus: Bus) -> Contents:
    """Read everything as the operator."""
    messages, consumers, settings = set(), set(), []
    for stream in [*(str(config.name) for config in bus.topology.streams(2)), f"KV_{bus.topology.bucket}"]:
        info = await bus.js.stream_info(stream)
        settings.append(info.config.as_dict())
        for consumer in await bus.js.consumers_info(stream):
            settings.append(consumer.config.as_dict())
            consumers.add((stream, str(consumer.name), f"{consumer.delivered} {consumer.ack_floor}"))
        numbers = range(max(info.state.first_seq, 1), info.state.last_seq + 1)  # 0: none was ever stored
        for begin in range(0, len(numbers), AT_ONCE):
            asked = (_message(bus, stream, number) for number in numbers[begin : begin + AT_ONCE])
            messages |= {found for found in await asyncio.gather(*asked) if _has_readers(found, info.config)}
    sorted_settings = sorted(json.dumps(one, default=str, sort_keys=True) for one in settings)
    return Contents(frozenset(messages), frozenset(consumers), "\n".join(sorted_settings))


def _has_readers(found: Message | None, config: StreamConfig) -> TypeGuard[Message]:
    """Return whether a message is one of its stream's subjects, by which all are read.

    Of a task that an actor pulls to where it may write, a cluster stores a copy, under the task's subject."""
    return found is not None and any(matches(subject, found[1]) for subject in config.subjects or ())


async def _message(bus: Bus, stream: str, sequence: int) -> Message | None:
    try:
        raw = await bus.js.get_msg(stream, sequence)
    except NotFoundError:
        return None
    return stream, str(raw.subject), sequence, sha256(bytes(raw.data or b"")).hexdigest()


def operator_of(secure: SecureDirectory, replicas: int = 1) -> AbstractAsyncContextManager[Bus]:
    """Connect as the run's operator."""
    path, streams = secure.path / RUN / "operator.creds", StreamsConfig(replicas=replicas)
    config = BusConfig(url=load_credentials(path).url, creds=path, streams=streams)
    return Bus.connect(config, RUN, name="operator")


async def make_run(bus: Bus) -> None:
    """Make the run's streams and keys, each with messages."""
    async with asyncio.timeout(60):
        while True:
            try:
                await bus.create_keys()
                await ensure(bus.js, bus.topology, shards=2)
                await bus.look_at_role_keys()  # the operator writes them once, which no test is to see
                for subject in stored_subjects():
                    if not subject.endswith(f".{ROLE_KEYS}"):
                        await bus.js.publish(subject, f"true {subject}".encode())
            except (BusError, nats.errors.Error):  # a cluster has no leader yet
                await asyncio.sleep(0.2)
            else:
                return


def stored_subjects() -> list[str]:
    """Return the subjects of a run's messages, one of each kind."""
    topology = Topology(RUN)
    return [*(f"$KV.{topology.bucket}.{key}" for key in KEYS), *map(topology.subject, SUBJECTS)]


async def before_and_after(
    secure: SecureDirectory, role: str, messages: Callable[[Credentials], Iterable[Sent]]
) -> tuple[Contents, Contents]:
    """Return what the streams hold before and after an enemy of this role has sent these messages."""
    credentials = load_credentials(secure.path / RUN / f"{role}.creds")
    async with operator_of(secure) as bus:
        before = await contents(bus)
        async with enemy(credentials) as client:
            await send(client, messages(credentials))
            await settle(client, credentials)
        return before, await contents(bus)
