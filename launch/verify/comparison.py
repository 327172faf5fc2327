"""Compares what actors sent, what storage holds and what was trained on: each difference has one verdict."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from bus.codec import Json
from bus.messages import group_name, trajectory_name
from bus.topology import shard_of
from launch.verify.evidence import (
    Acknowledgement,
    ActorRecords,
    Evidence,
    Key,
    Sending,
    Stored,
    TrainedOn,
    place_of,
)
from storage.account.records import Copy, DropReason
from storage.ledger.ledger import DAMAGED

BROKEN = ("lost", "altered", "twice", "unlisted", "steps_without_records")
"""Verdicts that no run may have: `launch verify` then ends with status 1."""
NOT_VERIFIABLE = 3
"""Exit status where nothing is broken, and records of who sent, gave or trained something are not here."""
VERDICTS = {
    "lost": "acknowledged, and neither stored nor accounted for in any other way",
    "altered": "stored or trained on otherwise than it was sent",
    "twice": "stored twice, or trained on more often than the sampler allows",
    "re_rolled": "leases rolled out again after one of their trajectories had been acknowledged",
    "never_acknowledged": "trained on, and in the records of an actor that never saw the acknowledgement",
    "unlisted": "stored, rewarded or trained on, and missing in the records of its actor or giver",
    "steps_without_records": "steps of which a learner that kept records has none",
    "not_verifiable": "records are not here: of an older build, of another host (--records), or removed",
    "in_flight": "acknowledged, and still on the bus",
    "lost_with_bus": "acknowledged, and gone with a stream that was set back to an earlier state",
    "another_copy": "acknowledged, and not stored: another copy of the same trajectory was there first",
    "closed_short": "acknowledged, and not stored: its group was closed without it",
    "settled": "acknowledged, and not stored: its lease was settled by then",
    "rejected": "acknowledged, and not stored: its shard set it aside, or its group was damaged",
    "retired": "acknowledged, and removed by retention",
    "late_rewards": "sent without a reward, which came later",
}
_DROPPED = {DropReason.HELD: "another_copy", DropReason.CLOSED: "closed_short", DropReason.SETTLED: "settled"}
_NOT_KEPT = ("set_aside", DAMAGED)
"""Reasons of rejections that explain why a trajectory is not in the store: its shard refused it, or its
segment broke. A shard stores or notes whatever comes of a lease that was rejected for another reason."""


@dataclass
class Verdicts:
    """What was found, by verdict: what it concerns, and why."""

    found: dict[str, dict[str, str]] = field(default_factory=lambda: {name: {} for name in VERDICTS})
    totals: Counter[str] = field(default_factory=Counter)
    in_flight: list[Acknowledgement] = field(default_factory=list)
    """Acknowledgements whose message is on the bus and nowhere else."""
    bus_silence: str = ""
    """Why the bus did not tell which messages it still has; empty if it did."""

    def add(self, verdict: str, what: str, why: str = "") -> None:
        """Add a finding; of one thing the first reason of a verdict stays."""
        self.found[verdict].setdefault(what, why)

    @property
    def is_broken(self) -> bool:
        """Tell whether there is anything that no run may have."""
        return any(self.found[name] for name in BROKEN)

    def to_json(self) -> dict[str, Json]:
        counts: dict[str, Json] = {name: len(things) for name, things in self.found.items()}
        named: dict[str, Json] = {name: dict(things) for name, things in self.found.items() if things}
        bus: dict[str, Json] = {"bus": not self.bus_silence, "bus_silence": self.bus_silence}
        return {**dict(self.totals), **counts, **bus, "named": named}


def status_of(found: Mapping[str, object]) -> int:
    """Return the exit status for `Verdicts.to_json`: 0 only where everything was compared and is well."""
    if any(found[name] for name in BROKEN):
        return 1
    return NOT_VERIFIABLE if found["not_verifiable"] else 0


def compare(
    evidence: Evidence,
    *,
    on_bus: Callable[[Acknowledgement], bool | None],
    went_with_bus: Callable[[Acknowledgement], bool] = lambda answer: False,
) -> Verdicts:
    """Compare everything.

    Args:
        evidence: what the processes left.
        on_bus: tells whether the message of an acknowledgement is still on its stream; None if nobody knows.
        went_with_bus: tells whether whoever asks knows that the bus has lost it, such as a soak that did it.
    """
    verdicts = Verdicts()
    store = evidence.store.stored
    verdicts.totals.update(
        acknowledged=len({key_of(copy) for copy in evidence.before.acknowledged}),
        stored=len(store),
        trained=len(evidence.trained),
        steps=len(evidence.steps),
    )
    missing = _Missing(evidence, on_bus, went_with_bus)
    for copy, answers in evidence.before.acknowledged.items():
        if not any(one.copy == copy for one in store.get(key_of(copy), ())):
            verdict, name, why = missing.verdict_of(copy, answers)
            verdicts.add(verdict, name, why)
            if verdict == "in_flight":
                verdicts.in_flight += answers
    _compare_stored(evidence, verdicts)
    _compare_trained(evidence, verdicts)
    _count_uses(evidence, verdicts)
    _find_re_rolled(evidence.after, verdicts)
    return verdicts


def key_of(copy: Copy) -> Key:
    return copy.lease_id, copy.sample


def name_of(copy: Copy) -> str:
    return trajectory_name(copy.lease_id, copy.sample)


class _Missing:
    """Explains trajectories that were acknowledged and are not in the store."""

    def __init__(
        self, evidence: Evidence, on_bus: Callable[[Acknowledgement], bool | None],
        went_with_bus: Callable[[Acknowledgement], bool],
    ) -> None:  # fmt: skip
        self._evidence = evidence
        self._on_bus = on_bus
        self._went_with_bus = went_with_bus
        self._newest_stored = _newest_stored(evidence)
        self._set_back = _SetBack(evidence.after, evidence.shards)
        acknowledged = evidence.before.acknowledged.items()
        duplicates = {key_of(copy) for copy, answers in acknowledged if any(one.duplicate for one in answers)}
        self._sent_again = _sendings_of(evidence.after, duplicates)
        """What was sent of each trajectory that the bus says it had already."""

    def verdict_of(self, copy: Copy, answers: list[Acknowledgement]) -> tuple[str, str, str]:
        store, lease_id, name = self._evidence.store, copy.lease_id, name_of(copy)
        others = store.stored.get(key_of(copy), [])
        if (reason := store.dropped.get(copy)) is not None:
            return _DROPPED[reason], name, ""
        if strangers := [one for one in others if one.copy not in self._evidence.after.sent]:
            return "altered", name, _difference(strangers[0], [answers[0].sending])
        if others and self._bus_had_another(copy, answers):
            return "another_copy", name, "the bus had a message of that name already"
        if not others and store.is_retired(lease_id):
            return "retired", name, ""
        rejected = self._evidence.reasons.get(lease_id, "")
        if rejected in _NOT_KEPT:
            return "rejected", name, rejected
        last = max(answers, key=lambda answer: answer.at_s)
        if self._is_in_flight(last):
            return "in_flight", name, f"message {last.sequence}"
        if self._went_with_bus(last) or self._set_back.covers(last):
            return "lost_with_bus", name, f"message {last.sequence}"
        why = f"message {last.sequence} to {last.sending.writer}'s account"
        what = "another copy of it is stored" if others else "nothing of that name is stored"
        ended = f"; its lease was rejected: {rejected}" if rejected else ""
        return "lost", name, f"{why}; {what}{ended}"

    def _bus_had_another(self, copy: Copy, answers: list[Acknowledgement]) -> bool:
        """Tell whether the bus had a message of that name when it had none of this copy's: another copy was
        sent before. Otherwise it had this copy's, whose sender missed the first answer and sent it again."""
        others = [one for one in self._sent_again.get(key_of(copy), ()) if one.copy != copy]
        return all(
            answer.duplicate
            and any(one.host != answer.sending.host or one.sent_s < answer.at_s for one in others)
            for answer in answers
        )

    def _is_in_flight(self, answer: Acknowledgement) -> bool:
        """Ask the bus; without an answer, what is younger than all that its shard stored may be there."""
        known = self._on_bus(answer)
        shard = shard_of(answer.sending.copy.lease_id, self._evidence.shards)
        return answer.sequence > self._newest_stored[shard] if known is None else known


class _SetBack:
    """Finds acknowledgements of a stream that was set back to an earlier state since: it gave their number,
    or a lower one, to a message that was sent later."""

    def __init__(self, records: ActorRecords, shards: int) -> None:
        self._shards = shards
        self._lowest: defaultdict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
        """By host and stream: when messages were sent, and the lowest number of those sent then or later;
        descending."""
        answers = [one for many in records.acknowledged.values() for one in many if not one.duplicate]
        for answer in sorted(answers, key=lambda one: one.sending.sent_s, reverse=True):
            lowest = self._lowest[self._stream_of(answer)]
            if not lowest or answer.sequence < lowest[-1][1]:
                lowest.append((answer.sending.sent_s, answer.sequence))

    def covers(self, answer: Acknowledgement) -> bool:
        """Tell whether the stream went back behind this message."""
        later = self._lowest[self._stream_of(answer)]
        return any(sent_s > answer.at_s and sequence <= answer.sequence for sent_s, sequence in later)

    def _stream_of(self, answer: Acknowledgement) -> tuple[str, str]:
        return answer.sending.host, place_of(answer, self._shards)[0]


def _newest_stored(evidence: Evidence) -> Counter[int]:
    """Return the highest number on the stream of a message that is stored, by shard."""
    newest = Counter[int]()
    for copy, answers in evidence.before.acknowledged.items():
        if any(one.copy == copy for one in evidence.store.stored.get(key_of(copy), ())):
            shard = shard_of(copy.lease_id, evidence.shards)
            newest[shard] = max(newest[shard], *(answer.sequence for answer in answers))
    return newest


def _compare_stored(evidence: Evidence, verdicts: Verdicts) -> None:
    sent = evidence.after.sent
    strangers = [
        (key, one) for key, many in evidence.store.stored.items() for one in many if one.copy not in sent
    ]
    by_key = _sendings_of(evidence.after, {key for key, _ in strangers})
    for key, one in strangers:
        others, name = by_key.get(key, []), name_of(one.copy)
        if others and one.actor in evidence.after.writers:
            verdicts.add("altered", name, _difference(one, others))
        else:
            _add_unlisted(evidence.after, verdicts, name, one.actor)
    for many in evidence.store.stored.values():
        for one in many:
            if one.copy.reward is None and one.reward is not None:
                _compare_late(evidence.after, verdicts, one)


def _add_unlisted(records: ActorRecords, verdicts: Verdicts, name: str, writer: str) -> None:
    """Add what the sender or giver did not write down, or what cannot be known without its records."""
    if writer in records.writers - records.incomplete:
        verdicts.add("unlisted", name, f"{writer} kept records, and has none of it")
    else:
        verdicts.add("not_verifiable", name, f"no or not all records of {writer or 'its sender'} are here")


def _compare_late(records: ActorRecords, verdicts: Verdicts, one: Stored) -> None:
    """Compare a late reward with what its giver gave: of several givers the first counts, of which storage
    alone knows the order."""
    name, given = name_of(one.copy), records.given.get((*key_of(one.copy), one.source))
    verdicts.add("late_rewards", name)
    if given is None:
        _add_unlisted(records, verdicts, name, one.source)
    elif one.reward not in given:
        values = " or ".join(map(str, sorted(value for value in given if value is not None)))
        verdicts.add("altered", name, f"its late reward was given as {values} and is stored as {one.reward}")


def _difference(one: Stored, others: list[Sending]) -> str:
    for other in others:
        if other.copy.digest == one.copy.digest:
            return f"its reward was sent as {other.copy.reward} and is stored as {one.copy.reward}"
    return f"its content is not what {' or '.join(sorted({other.writer for other in others}))} sent"


def _sendings_of(records: ActorRecords, wanted: set[Key]) -> dict[Key, list[Sending]]:
    found: defaultdict[Key, list[Sending]] = defaultdict(list)
    if wanted:
        for copy, sendings in records.sent.items():
            if key_of(copy) in wanted:
                found[key_of(copy)] += sendings
    return found


def _compare_trained(evidence: Evidence, verdicts: Verdicts) -> None:
    """Find what a step trained on and is not stored so, or was never acknowledged."""
    sent = {(copy.lease_id, copy.sample, copy.digest) for copy in evidence.after.sent}
    acknowledged = {(copy.lease_id, copy.sample, copy.digest) for copy in evidence.after.acknowledged}
    listed = {key_of(copy) for copy in evidence.after.sent}
    for step, copy in evidence.trained:
        key, name, identity = key_of(copy), name_of(copy), (copy.lease_id, copy.sample, copy.digest)
        there = evidence.store.stored.get(key, [])
        if there and not any(one.copy.digest == copy.digest and one.reward == copy.reward for one in there):
            verdicts.add(
                "altered", name, f"step {step} trained on other content or another reward than is stored"
            )
        elif not there and key in listed and identity not in sent:
            verdicts.add("altered", name, f"step {step} trained on other content than was sent")
        if identity in sent and identity not in acknowledged:
            verdicts.add("never_acknowledged", name, f"step {step}")
        elif key not in listed and not there:
            partial = evidence.after.incomplete or not evidence.after.writers
            unknown = partial or evidence.store.is_retired(copy.lease_id)
            verdicts.add("not_verifiable" if unknown else "unlisted", name, f"step {step}; it is not stored")


def _count_uses(evidence: Evidence, verdicts: Verdicts) -> None:
    """Find what is stored or trained on too often, and records that contradict the lineage."""
    for key, many in evidence.store.stored.items():
        if len(many) > 1:
            verdicts.add("twice", trajectory_name(*key), f"stored {len(many)} times")
    uses = Counter(lease for leases in evidence.steps.values() for lease in leases)
    for lease, count in uses.items():
        if count > evidence.max_reuse:
            verdicts.add("twice", group_name(lease), f"in {count} steps, {evidence.max_reuse} allowed")
    by_step = defaultdict(list)
    for one in evidence.trained:
        by_step[one.step].append(one)
    for step, leases in evidence.steps.items():
        recorded = by_step.get(step, [])
        if not recorded:
            missing = "not_verifiable" if step in evidence.unrecorded else "steps_without_records"
            verdicts.add(missing, f"step {step}", "its learner has no record of it")
            continue
        for what, why in _misuses(step, leases, recorded):
            verdicts.add("twice" if "times" in why else "altered", what, why)


def _misuses(step: int, leases: Iterable[int], recorded: list[TrainedOn]) -> Iterator[tuple[str, str]]:
    for copy, count in Counter(one.copy for one in recorded).items():
        if count > 1:
            yield name_of(copy), f"{count} times in step {step}"
    trained = {one.copy.lease_id for one in recorded}
    if trained != set(leases):
        other = sorted(trained ^ set(leases))
        yield f"step {step}", f"lineage and learner differ about groups {', '.join(map(group_name, other))}"


def _find_re_rolled(records: ActorRecords, verdicts: Verdicts) -> None:
    """Find leases that were rolled out again although the bus had acknowledged a trajectory of them."""
    by_key: defaultdict[Key, list[Sending]] = defaultdict(list)
    for copy, sendings in records.sent.items():
        by_key[key_of(copy)] += sendings
    again = {key: sendings for key, sendings in by_key.items() if len(sendings) > 1}
    answers: defaultdict[Key, list[Acknowledgement]] = defaultdict(list)
    for copy, many in records.acknowledged.items():
        if key_of(copy) in again:
            answers[key_of(copy)] += many
    for key, sendings in again.items():
        for answer in answers[key]:
            later = [one for one in sendings if one.host == answer.sending.host and one.sent_s > answer.at_s]
            if later:
                verdicts.add(
                    "re_rolled", group_name(key[0]),
                    f"{trajectory_name(*key)} was acknowledged to {answer.sending.writer} "
                    f"{later[0].sent_s - answer.at_s:.1f} s before {later[0].writer} sent it again",
                )  # fmt: skip
