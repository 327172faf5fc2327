"""The table of permissions: what each role of a run may publish and hear, as nats-server takes it."""

from collections.abc import Callable
from dataclasses import dataclass

from bus.device_messages import HOLD_KEY, USERS
from bus.record_rules import ROLE_KEYS
from bus.topology import Topology

ROLES = ("operator", "storage", "learner", "actor", "judge", "watcher")
ANSWER_WITHIN = "10m"
"""Longest time in which a role may answer what it heard, or say that it took a piece of an answer."""


@dataclass(frozen=True)
class Permissions:
    """Subjects of one role. All else is forbidden."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: bool = False
    """Says whether it may answer each request that it hears, wherever the asker listens, and take the
    pieces of long answers."""


def permissions(run: str, role: str) -> Permissions:
    """Return what `role`, one of `ROLES`, may do in `run`."""
    topology = Topology(run)
    if role == "operator":
        return Permissions((">",), (">",))
    found = _TABLE[role](topology)
    return Permissions(found.publish, (*found.subscribe, f"{inbox_prefix(run, role)}.>"), found.answers)


def inbox_prefix(run: str, role: str) -> str:
    """Return the prefix of the subjects on which a role hears answers; others cannot listen there."""
    return f"_INBOX.{run}.{role}"


def _storage(t: Topology) -> Permissions:
    streams = [*(str(config.name) for config in t.streams()), f"KV_{t.bucket}"]
    api = [
        f"$JS.API.{verb}.{stream}"
        for stream in streams
        for verb in ("STREAM.INFO", "STREAM.CREATE", "STREAM.UPDATE")
    ]
    consumers = [f"$JS.API.CONSUMER.*.{stream}.>" for stream in streams]
    durable = [f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.*" for stream in streams]
    pulls = [f"$JS.API.CONSUMER.MSG.NEXT.{t.stream(name)}.*" for name in ("OUTCOMES", "TRAJECTORIES")]
    taken = [f"$JS.ACK.{t.stream(name)}.>" for name in ("OUTCOMES", "TRAJECTORIES")]
    return Permissions(
        publish=(
            *api,
            *consumers,
            *durable,
            *taken,
            *pulls,
            f"$JS.API.STREAM.PURGE.{t.stream('FILES')}",
            *_read_keys(t),
            *_read_blobs(t),
            _read_events(t),
            *_keys(t, "run", "identity", "heldout", "heldout.*", "pace", "role.*", ROLE_KEYS),
            *_subjects(t, "tasks.>", "files.>", "dead.>", "outcomes.rejected", "events.>", "rpc.>"),
            *_subjects(t, "notice.stored", "notice.pace", "status.storage", "status.shards"),
            f"_INBOX.{t.run}.>",
        ),
        subscribe=_subjects(t, "rpc.>", "notice.>", "status.actor", "status.learner", "status.storage"),
    )


def _learner(t: Topology) -> Permissions:
    blobs = [t.stream(name) for name in ("WEIGHTS", "FILES")]
    return Permissions(
        publish=(
            *(f"$JS.API.STREAM.{verb}.{stream}" for stream in blobs for verb in ("INFO", "PURGE")),
            *_read_keys(t),
            *_read_blobs(t),
            *_keys(t, "policy", "role.*", HOLD_KEY, f"{USERS}.*"),
            *_subjects(t, "weights.>", "files.model.>", "tasks.evaluation", "events.metrics"),
            *_subjects(t, "notice.policy", "notice.device"),
            *_subjects(t, "status.learner", "status.rank", "status.shadow"),
            *_subjects(t, *(f"rpc.{what}" for what in LEARNER_ASKS)),
        ),
        subscribe=_subjects(
            t,
            "access.*",
            "broadcast.*",
            "notice.snapshot",
            "notice.device-user",
            "events.evaluation",
            COUNTERS,
        ),
        answers=True,
    )


def _actor(t: Topology) -> Permissions:
    tasks, dead = t.stream("TASKS"), t.subject("dead", ">")
    consumers = [
        subject
        for durable in ("rollout", "evaluation")
        for subject in (
            f"$JS.API.CONSUMER.MSG.NEXT.{tasks}.{durable}",
            f"$JS.API.CONSUMER.INFO.{tasks}.{durable}",
            f"$JS.ACK.{tasks}.{durable}.>",
        )
    ]
    return Permissions(
        publish=(
            *consumers,
            *_read_keys(t),
            *_read_blobs(t),
            *_keys(t, f"{USERS}.*", "role.engine.*"),
            dead,
            *_subjects(t, "trajectories.*", "outcomes.rejected"),
            *_subjects(t, "events.metrics", "events.evaluation", COUNTERS),
            *_subjects(t, "rpc.lease", "rpc.group_status.*", "rpc.kept_turns.*"),
            *_subjects(t, "access.*", "broadcast.*", "relay.*", "status.actor"),
            *_subjects(t, "notice.snapshot", "notice.device-user"),
        ),
        subscribe=_subjects(t, "notice.policy", "notice.pace", "notice.device", "relay.*", "rpc.engines.*"),
        answers=True,
    )


def _judge(t: Topology) -> Permissions:
    return Permissions(
        publish=(*_read_keys(t), *_subjects(t, "outcomes.rewards.*")),
        subscribe=(),
    )


def _watcher(t: Topology) -> Permissions:
    streams = [str(config.name) for config in t.streams()]
    return Permissions(
        publish=(
            *_read_keys(t),
            _read_events(t),
            *(f"$JS.API.STREAM.INFO.{stream}" for stream in streams),
            *(f"$JS.API.CONSUMER.INFO.{stream}.*" for stream in streams),
            f"$JS.API.STREAM.MSG.GET.{t.stream('EVENTS')}",
            f"$JS.API.DIRECT.GET.{t.stream('FILES')}.>",
            *_subjects(t, "rpc.step_groups", "rpc.stored.*", "rpc.read.*"),
        ),
        subscribe=_subjects(t, "status.*", "events.>", "notice.policy"),
        answers=True,  # it takes the pieces of long answers; what it hears besides asks for no answer
    )


COUNTERS = "events.counters.actor"
"""Actors' counters, apart from metrics and evaluations: these come every second, and screens need none."""
LEARNER_ASKS = (
    "batch",
    "step_groups",
    "committed",
    "unreadable",
    "resumed",
    "stored.*",
    "read.*",
    "locate.*",
)
"""Requests by which the learner gets its batches."""
_TABLE: dict[str, Callable[[Topology], Permissions]] = {
    "storage": _storage,
    "learner": _learner,
    "actor": _actor,
    "judge": _judge,
    "watcher": _watcher,
}


def _subjects(t: Topology, *names: str) -> tuple[str, ...]:
    return tuple(t.subject(name) for name in names)


def _keys(t: Topology, *names: str) -> tuple[str, ...]:
    """Return the subjects by which keys are set and removed."""
    return tuple(f"$KV.{t.bucket}.{name}" for name in names)


def _read_keys(t: Topology) -> tuple[str, ...]:
    """Return the subjects by which keys are read and listed; the server does not tell keys apart here."""
    stream = f"KV_{t.bucket}"
    return f"$JS.API.STREAM.INFO.{stream}", f"$JS.API.STREAM.MSG.GET.{stream}"


def _read_blobs(t: Topology) -> tuple[str, ...]:
    return tuple(f"$JS.API.DIRECT.GET.{t.stream(name)}.>" for name in ("WEIGHTS", "FILES"))


def _read_events(t: Topology) -> str:
    """Return the subject by which the events that the bus still holds are read (`bus/stream_reader.py`)."""
    return f"$JS.API.DIRECT.GET.{t.stream('EVENTS')}"
