"""Streams, consumers and subjects of a run as data, and `ensure`, which creates them."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import structlog
from nats.errors import Error as NatsError
from nats.js.api import ConsumerConfig, DiscardPolicy, RetentionPolicy, StreamConfig
from nats.js.client import JetStreamContext
from nats.js.errors import NotFoundError

from bus.config import StreamsConfig
from bus.errors import BusError, ConfigError

log = structlog.get_logger()
ACK_WAIT_S = 30.0
"""Seconds without ack or progress after which a message is delivered to another consumer."""
DUPLICATE_WINDOW_S = 120
"""Seconds within which a message with the same id is a duplicate."""
MAX_PULLERS = 1 << 16
"""Pulls that may wait on one consumer; the server's default of 512 would refuse further actors."""
NO_ROOM = 10047
"""Code by which nats-server refuses a stream whose bound is above the room that is left."""
TRAJECTORIES = "TRAJECTORIES"
MOST_TRAJECTORY_STREAMS = 16
"""Most streams of trajectories. A secured bus names each to storage; further shards share them in turn."""
MIB = 1 << 20
LEAST_TRAJECTORIES = 16 * MIB
"""Least bound of such a stream, in bytes: a trajectory that travels in parts must fit as a whole."""
_LOCKED = {"allow_rollup_hdrs": False, "deny_delete": True, "deny_purge": True}
"""Settings of the keys' stream by which no message, and no request but its deletion, removes others."""


@dataclass(frozen=True)
class Topology:
    """Names on the bus that belong to one run."""

    run: str
    config: StreamsConfig = field(default_factory=StreamsConfig)

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a run name that cannot be part of a subject and a stream's name."""
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.run):
            raise ConfigError(f"run name {self.run!r}: use letters, digits, '-' and '_' only")

    def stream(self, name: str) -> str:
        """Return the name of one of the run's streams: TASKS, TRAJECTORIES, TRAJECTORIES-1, ..., OUTCOMES,
        WEIGHTS, FILES, EVENTS or DEAD."""
        return f"{self.run}-{name}"

    def subject(self, *tokens: object) -> str:
        return ".".join(["sluice", self.run, *map(str, tokens)])

    @property
    def bucket(self) -> str:
        return f"sluice-{self.run}"

    def stored_subjects(self) -> tuple[str, ...]:
        """Return the beginnings of all subjects that JetStream hears: its API's, the keys', the streams'."""
        subjects = (subject for config in self.streams(1) for subject in config.subjects or ())
        return "$JS.", "$KV.", *(f"{subject.rpartition('.')[0]}." for subject in subjects)

    def stream_names(self) -> list[str]:
        """Return the names of all streams that the run may have, whatever its number of shards."""
        return [str(config.name) for config in self.streams(MOST_TRAJECTORY_STREAMS)]

    def streams(self, shards: int) -> tuple[StreamConfig, ...]:
        """Return every stream of the run.

        Work queues forget acked messages, and like FILES refuse new ones when they are full; the others drop
        the oldest."""
        sizes = self.config
        work = {
            "retention": RetentionPolicy.WORK_QUEUE,
            "discard": DiscardPolicy.NEW,
            "duplicate_window": DUPLICATE_WINDOW_S,
        }
        blobs = {"max_msgs_per_subject": 1, "allow_direct": True}
        return (
            self._stream("TASKS", "tasks", max_bytes=sizes.tasks_mib * MIB, **work),
            *self._trajectories(shards, **work),
            self._stream("OUTCOMES", "outcomes", max_bytes=sizes.outcomes_mib * MIB, **work),
            self._stream("WEIGHTS", "weights", max_bytes=sizes.weights_mib * MIB, **blobs),
            self._stream(
                "FILES", "files", max_bytes=sizes.files_mib * MIB, discard=DiscardPolicy.NEW, **blobs
            ),
            self._stream("EVENTS", "events", max_bytes=sizes.events_mib * MIB, allow_direct=True),
            self._stream("DEAD", "dead", max_bytes=sizes.dead_mib * MIB),
        )

    def keys(self) -> StreamConfig:
        """Return the stream of the run's keys, as `nats.js.kv` reads and writes them.

        Nothing of ours purges it. With the roll-up headers of other buckets whoever may write one key could
        erase all of them."""
        return StreamConfig(
            name=f"KV_{self.bucket}",
            subjects=[f"$KV.{self.bucket}.>"],
            storage="file",
            num_replicas=self.config.replicas,
            max_msgs_per_subject=1,
            discard=DiscardPolicy.NEW,
            duplicate_window=DUPLICATE_WINDOW_S,
            **_LOCKED,
        )

    def consumers(self, shards: int) -> tuple[tuple[str, ConsumerConfig], ...]:
        """Return every durable consumer with the stream that it reads."""
        return (
            ("TASKS", self._rollouts()),
            ("TASKS", self._consumer("evaluation", "tasks", "evaluation")),
            ("OUTCOMES", self._consumer("dispatcher", "outcomes", "rejected")),
            ("OUTCOMES", self._consumer("answers", "outcomes", "answers")),
            *(("OUTCOMES", self._consumer(f"rewards-{n}", "outcomes", "rewards", n)) for n in range(shards)),
            *((trajectories_stream(n), self.shard_consumer(n)) for n in range(shards)),
        )

    @staticmethod
    def shard_durable(shard: int) -> str:
        """Return the name of the consumer of a shard's trajectories."""
        return f"shard-{shard}"

    def shard_consumer(self, shard: int) -> ConsumerConfig:
        """Return the consumer by which a shard takes its trajectories."""
        return self._consumer(self.shard_durable(shard), "trajectories", shard)

    def trajectories_bytes(self, shards: int) -> int:
        """Return the bytes of trajectories that one stream holds, and one shard of what does not pass it."""
        return max(
            self.config.trajectories_mib * MIB // len(trajectories_streams(shards)), LEAST_TRAJECTORIES
        )

    def _trajectories(self, shards: int, **options: object) -> Iterator[StreamConfig]:
        """Yield a stream for each shard: a cluster has their leaders on several servers, and a shard that
        takes nothing fills its own stream alone."""
        names, max_bytes = trajectories_streams(shards), self.trajectories_bytes(shards)
        for first, name in enumerate(names):
            of_shards = [self.subject("trajectories", n) for n in range(first, shards, len(names))]
            yield self._stream(name, "trajectories", max_bytes=max_bytes, **options).evolve(
                subjects=of_shards
            )

    def _stream(self, name: str, token: str, **options: object) -> StreamConfig:
        return StreamConfig(
            name=self.stream(name),
            subjects=[self.subject(token, ">")],
            storage="file",
            num_replicas=self.config.replicas,
            **options,
        )

    def _rollouts(self) -> ConsumerConfig:
        """Return the consumer of leases. Each lease has its own subject, so one request lists all of them."""
        either = [self.subject("tasks", "rollout"), self.subject("tasks", "rollout", "*")]
        return self._consumer("rollout").evolve(filter_subject=None, filter_subjects=either)

    def _consumer(self, durable: str, *tokens: object) -> ConsumerConfig:
        return ConsumerConfig(
            durable_name=durable,
            filter_subject=self.subject(*tokens),
            ack_policy="explicit",
            ack_wait=ACK_WAIT_S,
            max_ack_pending=65536,
            max_waiting=MAX_PULLERS,
        )


async def ensure(js: JetStreamContext, topology: Topology, shards: int) -> set[str]:
    """Create or update the run's streams and consumers; return the streams that were new.

    Raises `BusError` when the server has no JetStream or refuses, as it does for settings of a stream that
    cannot change, and `ConfigError` when it has no room."""
    created = set()
    try:
        for config in topology.streams(shards):
            try:
                found = (await js.stream_info(config.name)).config
            except NotFoundError:
                await js.add_stream(config)
                created.add(config.name.removeprefix(f"{topology.run}-"))
            else:
                if changes := differences(found, config):
                    log.info("stream_updated", stream=config.name, **changes)
                    await js.update_stream(found.evolve(**changes))
        for stream, consumer in topology.consumers(shards):
            await js.add_consumer(topology.stream(stream), consumer)
    except NatsError as error:
        if getattr(error, "err_code", None) == NO_ROOM:
            raise ConfigError(_too_large(topology, shards)) from error
        raise BusError(f"the bus refuses the streams of run {topology.run!r}: {error}") from error
    return created


async def ensure_keys(js: JetStreamContext, topology: Topology) -> None:
    """Create the stream of the run's keys. One of an older build is locked; what else an operator has set of
    it stays.

    Raises nats-py's errors."""
    wanted = topology.keys()
    try:
        found = (await js.stream_info(wanted.name)).config
    except NotFoundError:
        await js.add_stream(wanted)
        return
    if changes := {name: value for name, value in _LOCKED.items() if getattr(found, name) != value}:
        log.info("stream_updated", stream=wanted.name, **changes)
        await js.update_stream(found.evolve(**changes))


def _too_large(topology: Topology, shards: int) -> str:
    """Return why nats-server has no room for the run's streams, whose bounds it reserves on its disk."""
    bounds = {str(config.name): config.max_bytes or 0 for config in topology.streams(shards)}
    largest = max(bounds, key=bounds.__getitem__)
    return (
        f"the bus has no room for the streams of run {topology.run!r}: they may grow to "
        f"{sum(bounds.values()) // MIB} MiB, {largest} alone to {bounds[largest] // MIB}, and nats-server "
        "uses three quarters of what was free on its disk: free some and start the bus again, or lower "
        "bus.streams.weights_mib, bus.streams.trajectories_mib, ..."
    )


async def stored_bytes(js: JetStreamContext, topology: Topology) -> dict[str, int]:
    """Return the bytes in each of the run's streams that exist, its key-value bucket among them, by name."""
    found = {}
    try:
        for name in (*topology.stream_names(), f"KV_{topology.bucket}"):
            try:
                found[name] = int((await js.stream_info(name)).state.bytes)
            except NotFoundError:
                continue
    except NatsError as error:
        raise BusError(f"cannot look at the streams of run {topology.run!r}: {error}") from error
    return found


async def remove(js: JetStreamContext, topology: Topology) -> None:
    """Delete the run's streams and its key-value bucket, with all that they hold; the bucket goes last."""
    try:
        for name in await stored_bytes(js, topology):
            await js.delete_stream(name)
    except NatsError as error:
        raise BusError(f"cannot remove the streams of run {topology.run!r}: {error}") from error


def differences(found: StreamConfig, wanted: StreamConfig) -> dict[str, object]:
    """Return the settings of `wanted` that `found` lacks.

    Settings that `wanted` leaves to the server stay as they are, and so do additional replicas and a larger
    size that an operator has set."""
    changes = {
        name: value
        for name, value in vars(wanted).items()
        if value is not None and value != getattr(found, name)
    }
    if not changes.get("duplicate_window"):
        changes.pop("duplicate_window", None)  # 0 lets the server choose
    if (found.num_replicas or 1) > (wanted.num_replicas or 1):
        changes.pop("num_replicas", None)
    if (found.max_bytes or -1) < 0 or (found.max_bytes or 0) > (wanted.max_bytes or 0):  # -1: without bound
        changes.pop("max_bytes", None)
    return changes


def stream_of(subject: str) -> str:
    """Return the stream of a run's subject, such as TASKS for sluice.<run>.tasks.rollout.7."""
    name, *rest = subject.split(".")[2:]
    return trajectories_stream(int(rest[0])) if name == "trajectories" else name.upper()


def trajectories_stream(shard: int) -> str:
    number = shard % MOST_TRAJECTORY_STREAMS
    return f"{TRAJECTORIES}-{number}" if number else TRAJECTORIES


def trajectories_streams(shards: int) -> list[str]:
    return [trajectories_stream(n) for n in range(min(shards, MOST_TRAJECTORY_STREAMS))]


def shard_of(lease_id: int, shards: int) -> int:
    return lease_id % shards


def by_shard(lease_ids: Iterable[int], shards: int) -> dict[int, list[int]]:
    """Group leases by the shard that keeps them, in the order given."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for lease_id in lease_ids:
        found[shard_of(lease_id, shards)].append(lease_id)
    return dict(found)
