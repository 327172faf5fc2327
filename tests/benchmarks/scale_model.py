"""Cost model of a publication: what a version takes from its announcement until many hosts have it.

The product's own tracker says who sends what to whom, by a clock of the model; links, event loops, digests
and tensors cost what they were measured to cost (docs/performance.md)."""

import heapq
import itertools
from dataclasses import dataclass, field

from bus.weight_requests import MOST_PARTS, PartsAsked
from storage.weights import swarm
from storage.weights.blob_parts import BLOCK_BYTES
from storage.weights.part_tracker import FETCHED, HAD, LACKED, PartTracker


@dataclass(frozen=True)
class Machine:
    """A host of a cluster. All hosts are alike, and all their links lead to one switch."""

    link_bytes_per_s: float
    """Bandwidth in each direction."""
    sending_s: float = 0.0
    """Seconds of an event loop for a byte that it sends."""
    receiving_s: float = 0.0
    """The same of a byte that it receives; one loop of an actor does both."""
    question_s: float = 0.0
    """Seconds of the learner's loop for a question where parts are."""
    digest_bytes_per_s: float = float("inf")
    """SHA-256 of one thread; parts are verified beside what comes next."""

    @property
    def learner_bytes_per_s(self) -> float:
        """Return what the learner's server sends."""
        return 1 / (1 / self.link_bytes_per_s + self.sending_s)

    @property
    def host_bytes_per_s(self) -> float:
        """Return what an actor's server sends while as much comes in."""
        return 1 / max(1 / self.link_bytes_per_s, self.sending_s + self.receiving_s)


@dataclass(eq=False)
class _Uplink:
    """A server whose bandwidth its transfers share evenly."""

    bytes_per_s: float
    left: dict[tuple[int, int], float] = field(default_factory=dict)
    """Bytes that are still to be sent, by host and part."""
    at_s: float = 0.0
    changes: int = 0

    def advance(self, now: float) -> None:
        """Send until now."""
        if self.left:
            each = (now - self.at_s) * self.bytes_per_s / len(self.left)
            self.left = {one: size - each for one, size in self.left.items()}
        self.at_s = now

    def next_end(self) -> float:
        """Return when the next transfer ends."""
        return self.at_s + min(self.left.values()) * len(self.left) / self.bytes_per_s


@dataclass(eq=False)
class _Host:
    """An actor that fetches a blob."""

    states: bytearray
    begun_s: dict[int, float] = field(default_factory=dict)
    due_s: float = 0.0
    """When the link has delivered what was begun."""
    asks_until_s: float = 0.0
    asks_again_s: float | None = 0.0
    """When it asks next; None for one that has all."""


class Swarm:
    """Hosts that take one blob from each other and from the learner, by a clock of their own."""

    def __init__(self, machine: Machine, hosts: int, size_bytes: int, parts: int) -> None:
        self._machine, self._part_bytes = machine, size_bytes / parts
        self._now, self._free_s = 0.0, 0.0
        self._tracker = PartTracker(lambda: self._now)
        self._hosts = [_Host(bytearray([LACKED] * parts)) for _ in range(hosts)]
        self._uplinks = {"": _Uplink(machine.learner_bytes_per_s)}
        self._uplinks |= {_url(n): _Uplink(machine.host_bytes_per_s) for n in range(hosts)}
        self._events: list[tuple[float, int, str, object]] = []
        self._order = itertools.count()

    def run(self) -> float:
        """Return the seconds until the last host has all parts."""
        for n in range(len(self._hosts)):
            self._at(0.0, "ask", (n, 0.0))
        while any(LACKED in host.states or FETCHED in host.states for host in self._hosts):
            self._now, _, kind, what = heapq.heappop(self._events)
            getattr(self, f"_{kind}")(what)
        return self._now

    def _at(self, when_s: float, kind: str, what: object) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), kind, what))

    def _ask_at(self, n: int, when_s: float) -> None:
        host = self._hosts[n]
        host.asks_again_s = max(when_s, host.asks_until_s)
        self._at(host.asks_again_s, "ask", (n, host.asks_again_s))

    def _ask(self, asked: tuple[int, float]) -> None:
        """Have a host ask the learner, whose loop answers one after another."""
        n, when_s = asked
        host = self._hosts[n]
        if when_s != host.asks_again_s:  # a part has come meanwhile, and it asked then
            return
        self._free_s = host.asks_until_s = max(self._now, self._free_s) + self._machine.question_s
        question = PartsAsked(blob="b", host=str(n), url=_url(n), have=bytes(host.states))
        for source in self._tracker.sources(question, int(self._part_bytes)):
            host.states[source.part], host.begun_s[source.part] = FETCHED, self._free_s
            self._at(self._free_s, "begin", (source.url, n, source.part))
        if LACKED in host.states or FETCHED in host.states:
            self._ask_at(n, self._free_s + swarm.POLL_S)

    def _begin(self, begun: tuple[str, int, int]) -> None:
        url, n, part = begun
        uplink = self._uplinks[url]
        uplink.advance(self._now)
        uplink.left[n, part] = self._part_bytes
        self._changed(uplink)

    def _changed(self, uplink: _Uplink) -> None:
        uplink.changes += 1
        if uplink.left:
            self._at(uplink.next_end(), "sent", (uplink, uplink.changes))

    def _sent(self, ended: tuple[_Uplink, int]) -> None:
        """Note what a server has sent; its reader's link delivers one part after another."""
        uplink, changes = ended
        if changes != uplink.changes:
            return
        uplink.advance(self._now)
        n, part = min(uplink.left, key=lambda one: uplink.left[one])
        del uplink.left[n, part]
        host = self._hosts[n]
        host.due_s = max(host.due_s, host.begun_s[part]) + self._part_bytes / self._machine.link_bytes_per_s
        verified_s = self._part_bytes / self._machine.digest_bytes_per_s
        self._at(max(self._now, host.due_s) + verified_s, "had", (n, part))
        self._changed(uplink)

    def _had(self, come: tuple[int, int]) -> None:
        n, part = come
        self._hosts[n].states[part] = HAD
        self._ask_at(n, self._now)


@dataclass(frozen=True)
class Work:
    """What a host of 32 cores and 8 H200s does besides sending and receiving."""

    code_bytes_per_s: float = 17e9
    """Comparing all weights with those before, and coding what changed."""
    write_bytes_per_s: float = 4e9
    """Writing files in memory, with SHA-256 beside."""
    apply_bytes_per_s: float = 10e9
    """Making all weights of a delta and those before, in host memory."""
    load_bytes_per_s: float = 156e9
    """Writing the changes into the weights on one GPU, which stands still meanwhile."""
    gpus: int = 8
    delta_fraction: float = 0.007
    """Size of a delta over that of all weights."""


def version_s(machine: Machine, work: Work, hosts: int, size_bytes: int) -> dict[str, float]:
    """Return the seconds of each stage of a delta, and those until a first version is everywhere."""
    delta_bytes = int(work.delta_fraction * size_bytes)
    found = {
        "announced_s": size_bytes / work.code_bytes_per_s + delta_bytes / work.write_bytes_per_s,
        "received_s": received_s(machine, hosts, delta_bytes, parts_of(delta_bytes)),
        "applied_s": size_bytes / work.apply_bytes_per_s,
        "pause_s": size_bytes / work.gpus / work.load_bytes_per_s,
    }
    serving_s = found["received_s"] + found["applied_s"] + found["pause_s"]
    first_s = received_s(machine, hosts, size_bytes, parts_of(size_bytes))
    found |= {"serving_s": serving_s, "first_written_s": size_bytes / work.write_bytes_per_s}
    return found | {"first_received_s": first_s}


def received_s(machine: Machine, hosts: int, size_bytes: int, parts: int) -> float:
    """Return the seconds until all hosts have a blob of `parts` parts."""
    return Swarm(machine, hosts, size_bytes, parts).run()


def parts_of(size_bytes: int) -> int:
    """Return how many parts a blob of this size has."""
    blocks, a_part = -(-size_bytes // BLOCK_BYTES), 1
    while -(-blocks // a_part) > MOST_PARTS:
        a_part *= 2
    return -(-blocks // a_part)


def _url(n: int) -> str:
    return f"http://10.0.0.{n}:1"
