"""What the processes of a run left on the disk about its trajectories: records, segments, ledger, lineage."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bus.errors import ConfigError, LostDataError, StorageError
from bus.topology import shard_of, trajectories_stream
from launch.run_view.run_files import recorded_config
from learner.progress import lineage
from storage.account.records import (
    ACTORS,
    DROPPED,
    GIVEN,
    TRAINED,
    Copy,
    DropReason,
    Kind,
    incomplete_writers,
    read_records,
)
from storage.disk.run_directory import RunDirectory
from storage.ledger.ledger_reader import facts_of, reasons_of
from storage.shard.ingest_checks import RUN_ID
from storage.store.layout import SegmentEntry
from storage.store.replay import ReplayStore
from storage.store.retired import load_retired
from storage.store.segments import Segment

ATTEMPTS = 8
"""Times that a store is opened anew since its writer merged or retired segments meanwhile."""
Key = tuple[int, int]
"""Lease and sample of a trajectory."""


class Sending(NamedTuple):
    """One publication of a trajectory by an actor."""

    copy: Copy
    writer: str
    host: str
    sent_s: float
    """By the monotonic clock of the host."""


class Acknowledgement(NamedTuple):
    """The bus's answer to a publication."""

    sending: Sending
    sequence: int
    """Number of the message on the stream."""
    duplicate: bool
    """Says whether the bus had a message of that name already."""
    at_s: float
    """By the monotonic clock of the host."""


def place_of(answer: Acknowledgement, shards: int) -> tuple[str, int]:
    """Return the stream that the message was stored on, and its number there."""
    return trajectories_stream(shard_of(answer.sending.copy.lease_id, shards)), answer.sequence


@dataclass
class ActorRecords:
    """What actors wrote down."""

    sent: dict[Copy, list[Sending]] = field(default_factory=dict)
    acknowledged: dict[Copy, list[Acknowledgement]] = field(default_factory=dict)
    given: dict[tuple[int, int, str], set[float | None]] = field(default_factory=dict)
    """Late rewards by lease, sample and who gave them."""
    writers: set[str] = field(default_factory=set)
    """Actors, and sources of late rewards, of which there are records."""
    incomplete: set[str] = field(default_factory=set)
    """Writers some of whose records are known to be gone."""
    garbled: int = 0


class Stored(NamedTuple):
    """A trajectory in a segment."""

    copy: Copy
    """The trajectory as it arrived: a reward that came later is not in it."""
    actor: str
    reward: float | None
    """Reward that the trajectory has now, also one that came later."""
    source: str = ""


@dataclass
class StoreContent:
    """What the stores of all shards hold."""

    stored: dict[Key, list[Stored]] = field(default_factory=dict)
    """By lease and sample: one each, unless something was stored twice."""
    retired: list[range] = field(default_factory=list)
    """Leases, from the lowest to the highest, of segments that were retired."""
    dropped: dict[Copy, DropReason] = field(default_factory=dict)

    def is_retired(self, lease_id: int) -> bool:
        """Tell whether a segment was retired that may have held trajectories of this lease."""
        return any(lease_id in leases for leases in self.retired)


class TrainedOn(NamedTuple):
    """A trajectory as a step of the learner had it."""

    step: int
    copy: Copy


@dataclass
class Evidence:
    """Everything that is compared."""

    before: ActorRecords
    """Records of actors as they were before the store was read: each acknowledged one must be stored."""
    after: ActorRecords
    """Records of actors afterwards: each trajectory that is stored must have been sent."""
    store: StoreContent
    trained: list[TrainedOn]
    """What the steps that made the newest weights trained on, as far as the learner wrote it down."""
    steps: dict[int, tuple[int, ...]]
    """Leases by step, by the lineage."""
    unrecorded: set[int]
    """Steps of learners that wrote no records at all, or whose records are known to be gone."""
    reasons: dict[int, str]
    """Why leases were rejected."""
    max_reuse: int
    shards: int


def collect(run: RunDirectory, lists: Sequence[Path] = ()) -> Evidence:
    """Read what a run left, which may go on meanwhile. Raises `ConfigError` when the stores or the ledger are
    not here, and `StorageError` for what is damaged. `lists` are directories with records from other
    hosts."""
    config = recorded_config(run)
    identity = facts_of(run.ledger).get(RUN_ID, "")
    shards = [run.path / "replay" / f"shard_{number:02d}" for number in range(config.replay.shards)]
    if missing := [path for path in shards if not path.is_dir()]:
        raise ConfigError(f"{missing[0]} is missing: its shard is on another host, where verify must read it")
    actors = [run.path / ACTORS, run.path / GIVEN, *lists]
    before = actor_records(actors, identity)
    steps = lineage.steps(run.path / "lineage.jsonl")
    trained, unrecorded = _trained(run.path / TRAINED, {n: step.incarnation for n, step in steps.items()})
    store = StoreContent()
    for shard in shards:
        read_store(shard, store)
    for directory in [*(shard / DROPPED for shard in shards), *lists]:
        for file in read_records(directory, run=identity):
            for one in file.records:
                if one.kind == Kind.DROPPED:
                    store.dropped[one.copy] = DropReason(one.number)
    return Evidence(
        before=before,
        after=actor_records(actors, identity),
        store=store,
        trained=trained,
        steps={n: step.leases for n, step in steps.items()},
        unrecorded=unrecorded,
        reasons=reasons_of(run.ledger),
        max_reuse=config.admission.sampler.max_reuse,
        shards=config.replay.shards,
    )


def actor_records(directories: Iterable[Path], identity: str) -> ActorRecords:
    """Return what actors of the run with this identity wrote down in these directories."""
    found = ActorRecords()
    for directory in directories:
        found.incomplete |= incomplete_writers(directory)
        for file in read_records(directory, run=identity):
            writer, host = file.owner.writer, file.owner.host
            found.garbled += file.garbled
            if file.garbled:
                found.incomplete.add(writer)
            for kind, copy, number, flag, since_s, written_s in file.records:
                sending = Sending(copy, writer, host, since_s)
                if kind == Kind.SENT:
                    found.writers.add(writer)
                    found.sent.setdefault(copy, []).append(sending)
                elif kind == Kind.ACKNOWLEDGED:
                    answer = Acknowledgement(sending, number, flag, written_s)
                    found.acknowledged.setdefault(copy, []).append(answer)
                elif kind == Kind.GIVEN:
                    found.writers.add(writer)
                    found.given.setdefault((copy.lease_id, copy.sample, writer), set()).add(copy.reward)
    return found


def _trained(directory: Path, incarnations: dict[int, str]) -> tuple[list[TrainedOn], set[int]]:
    """Return what steps trained on, where of a step that was trained again the last time counts, and the
    steps whose learner kept no records, or no longer has all of them."""
    found, keepers, incomplete = [], set[str](), incomplete_writers(directory)
    for file in read_records(directory):
        keepers.add(file.owner.writer)
        if file.garbled:
            incomplete.add(file.owner.writer)
        found += [
            TrainedOn(one.number, one.copy)
            for one in file.records
            if one.kind == Kind.TRAINED and incarnations.get(one.number) == file.owner.writer
        ]
    return found, {step for step, writer in incarnations.items() if writer not in keepers - incomplete}


def read_store(directory: Path, into: StoreContent) -> None:
    """Add what a store holds, which its writer may change meanwhile. Raises `StorageError` when a segment is
    torn, or a trajectory in it is."""
    read: dict[SegmentEntry, list[Stored]] = {}
    for attempt in range(ATTEMPTS):
        with closing(ReplayStore.open(directory, writable=False)) as store:
            try:
                for entry in store.entries:
                    if not entry.retired and entry not in read:
                        read[entry] = _read_segment(store, entry)
            except LostDataError:
                if attempt + 1 == ATTEMPTS or _is_there(store):
                    raise
                continue
            held: defaultdict[Key, list[Stored]] = defaultdict(list)
            for entry in store.entries:
                for one in read.get(entry, ()):
                    held[one.copy.lease_id, one.copy.sample].append(one)
            into.stored |= held
            for entry in store.entries:
                into.retired += _retired(store, entry) if entry.retired else []
            return
    raise StorageError(f"{directory} changes faster than it can be read: try again")


def _is_there(store: ReplayStore) -> bool:
    """Return whether every segment of the store is where it was: what is torn is no move of its writer."""
    return all((store.directory / entry.name).exists() for entry in store.entries)


def _read_segment(store: ReplayStore, entry: SegmentEntry) -> list[Stored]:
    with closing(Segment(store.directory / entry.name)) as segment:
        found = []
        for row in range(segment.summary.trajectories):
            trajectory = segment.trajectory(row)
            copy = Copy.of(trajectory)
            late = store.late_reward(copy.lease_id, copy.sample) if copy.reward is None else None
            if late is None:
                found.append(Stored(copy, trajectory.actor, copy.reward))
            else:
                found.append(Stored(copy, trajectory.actor, late.reward, late.source))
        return found


def _retired(store: ReplayStore, entry: SegmentEntry) -> list[range]:
    """Return the leases of what was retired, as exactly as that is known."""
    columns, pieces = load_retired(store.directory / entry.name, entry.first, entry.last)
    if columns is None:
        return [piece.leases for piece in pieces]
    return [range(lease, lease + 1) for lease in np.unique(columns.leases).tolist()]
