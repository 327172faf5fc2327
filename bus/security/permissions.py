"""The table of permissions: what each role of a run may publish and hear, as nats-server takes it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from bus.device_messages import HOLD_KEY, USERS
from bus.engine_nodes import NODES
from bus.security.record_rules import ROLE_KEYS
from bus.topology import MOST_TRAJECTORY_STREAMS, Topology, trajectories_streams

ROLES = ("operator", "storage", "learner", "actor", "judge", "watcher")
TAKEN = "taken"
"""Token behind the prefix of an inbox where a sender hears that a piece of its answer was taken."""


@dataclass(frozen=True)
class Permissions:
    """Subjects of one role. All else is forbidden."""

    publish: tuple[str, ...]
    """Subjects on which the role speaks to processes that listen, its answers included."""
    subscribe: tuple[str, ...]
    stored: tuple[str, ...] = ()
    """Subjects on which the role reaches JetStream (`bus/security/stream_access.py`)."""


@cache
def permissions(run: str, role: str) -> Permissions:
    topology = Topology(run)
    found = _TABLE[role](topology)
    publish = dict.fromkeys(found.publish)
    to_streams = topology.stored_subjects()
    stored = tuple(subject for subject in publish if subject.startswith(to_streams))
    events = topology.subject("events", "")  # events are stored, and heard by listeners as well
    spoken = (subject for subject in publish if subject not in stored or subject.startswith(events))
    answers = (f"{inbox_prefix(run, asker)}.>" for asker in _ANSWERS[role])
    taken = (f"{inbox_prefix(run, sender)}.{TAKEN}.>" for sender in _ASKS[role])
    own = f"{inbox_prefix(run, role)}.>"
    return Permissions((*spoken, *answers, *taken), (*found.subscribe, own), stored)


def inbox_prefix(run: str, role: str) -> str:
    """Return the prefix of the subjects on which a role hears answers; others cannot listen there."""
    return f"_INBOX.{run}.{role}"


def _storage(t: Topology) -> Permissions:
    streams = [*t.stream_names(), f"KV_{t.bucket}"]
    queues = [t.stream(name) for name in ("OUTCOMES", *trajectories_streams(MOST_TRAJECTORY_STREAMS))]
    api = [
        f"$JS.API.{verb}.{stream}"
        for stream in streams
        for verb in ("STREAM.INFO", "STREAM.CREATE", "STREAM.UPDATE")
    ]
    consumers = [f"$JS.API.CONSUMER.{verb}.{stream}.>" for stream in streams for verb in ("CREATE", "INFO")]
    durable = [f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.*" for stream in streams]
    pulls = [f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*" for stream in queues]
    taken = [f"$JS.ACK.{stream}.>" for stream in queues]
    return Permissions(
        publish=(
            *api,
            *consumers,
            *durable,
            *taken,
            *pulls,
            *_read_keys(t),
            *_read_blobs(t),
            _read_events(t),
            *_keys(t, "run", "identity", "heldout", "heldout.*", "pace", "role.*", ROLE_KEYS),
            *_subjects(t, "tasks.>", "files.>", "dead.>", "outcomes.rejected", "events.>", "rpc.>"),
            *_subjects(t, "notice.stored", "notice.pace", "status.storage", "status.shards"),
        ),
        subscribe=(*_subjects(t, "rpc.>", "notice.>", "status.*"),),
    )


def _learner(t: Topology) -> Permissions:
    blobs = [t.stream(name) for name in ("WEIGHTS", "FILES")]
    return Permissions(
        publish=(
            *(f"$JS.API.STREAM.INFO.{stream}" for stream in blobs),
            f"$JS.API.STREAM.PURGE.{t.stream('WEIGHTS')}",
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
            "rpc.profile",
            COUNTERS,
        ),
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
            *_keys(t, f"{USERS}.*", f"{NODES}.*", "role.engine.*"),
            dead,
            *_subjects(t, "trajectories.*", "outcomes.rejected", "outcomes.answers"),
            *_subjects(t, "events.metrics", "events.evaluation", COUNTERS),
            *_subjects(t, "rpc.lease", "rpc.group_status.*", "rpc.kept_turns.*", "rpc.experts.*"),
            *_subjects(t, "access.*", "broadcast.*", "status.actor"),
            *_subjects(t, "notice.snapshot", "notice.device-user"),
        ),
        subscribe=_subjects(t, "notice.policy", "notice.pace", "notice.device", "rpc.engines.*"),
    )


def _judge(t: Topology) -> Permissions:
    return Permissions(publish=(*_read_keys(t), *_subjects(t, "outcomes.rewards.*")), subscribe=())


def _watcher(t: Topology) -> Permissions:
    streams = t.stream_names()
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
    )


def _operator(t: Topology) -> Permissions:
    """Return all subjects. Requests of several answers stand apart: the server must know of these."""
    verbs = (
        "CREATE",
        "DURABLE.CREATE",
        "DELETE",
        "INFO",
        "LIST",
        "NAMES",
        "PAUSE",
        "RESET",
        "UNPIN",
        "LEADER",
    )
    keys, *_ = _keys(t, ">")
    return Permissions(
        publish=(
            ">",
            "$JS.API.INFO",
            "$JS.API.STREAM.>",
            *(f"$JS.API.CONSUMER.{verb}.>" for verb in verbs),
            "$JS.API.CONSUMER.MSG.NEXT.*.*",
            "$JS.API.DIRECT.GET.*",
            "$JS.API.DIRECT.GET.*.>",
            "$JS.ACK.>",
            keys,
            *(f"{beginning}>" for beginning in t.stored_subjects() if not beginning.startswith("$")),
        ),
        subscribe=(">",),
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
    "stored_experts.*",
    "locate.*",
)
"""Requests by which the learner gets its batches."""
_TABLE: dict[str, Callable[[Topology], Permissions]] = {
    "operator": _operator,
    "storage": _storage,
    "learner": _learner,
    "actor": _actor,
    "judge": _judge,
    "watcher": _watcher,
}
_ANSWERS: dict[str, tuple[str, ...]] = {
    "operator": ROLES,
    "storage": ROLES,
    "learner": ("operator", "actor"),
    "actor": ("operator",),
    "judge": (),
    "watcher": (),
}
"""Roles that a role may answer. Names of inboxes cannot be guessed. nats-server's `allow_responses` would be
no narrower: a role that hears itself could ask itself for an answer on any subject, and write there."""
_ASKS: dict[str, tuple[str, ...]] = {
    "operator": (),
    "storage": (),
    "learner": ("storage",),
    "actor": ("storage", "learner"),
    "judge": (),
    "watcher": ("storage",),
}
"""Roles that a role may not answer and may tell that it took a piece of their answer."""


def _subjects(t: Topology, *names: str) -> tuple[str, ...]:
    return tuple(t.subject(name) for name in names)


def _keys(t: Topology, *names: str) -> tuple[str, ...]:
    return tuple(f"$KV.{t.bucket}.{name}" for name in names)


def _read_keys(t: Topology) -> tuple[str, ...]:
    """Return the subjects by which keys are read and listed; the server does not tell keys apart here."""
    stream = f"KV_{t.bucket}"
    return f"$JS.API.STREAM.INFO.{stream}", f"$JS.API.STREAM.MSG.GET.{stream}"


def _read_blobs(t: Topology) -> tuple[str, ...]:
    return tuple(f"$JS.API.DIRECT.GET.{t.stream(name)}.>" for name in ("WEIGHTS", "FILES"))


def _read_events(t: Topology) -> str:
    return f"$JS.API.DIRECT.GET.{t.stream('EVENTS')}"
