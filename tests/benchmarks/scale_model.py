"""Cost model of a publication: what a version takes from its announcement until many hosts have it.

The product's own tracker says who sends what to whom, by a clock of the model; links, event loops, digests
and tensors cost what they were measured to cost (docs/performance.md)."""

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from bus.weight_requests import MOST_PARTS, PartsAsked
from storage.weights import swarm
from storage.weights.blob_parts import BLOCK_BYTES
from storage.weights.part_tracker import FETCHED, HAD, LACKED, PartTracker

PIECES = 8
"""Pieces in which a server sends a part (`storage.weights.blob_http.PART_BYTES`)."""


@dataclass(frozen=True)
class Machine:
    """A host of a cluster. All hosts are alike, and all their links lead to one switch."""

    link_bytes_per_s: float
    """Bandwidth in each direction."""
    sending_s: float = 0.0
    """Seconds of an event loop for a byte that it sends."""
    receiving_s: float = 0.0
    """The same of a byte that it receives; one loop of an actor does both."""
    served_part_s: float = 0.0
    """Seconds of an event loop for a part that it sends, beside those for its bytes."""
    fetched_part_s: float = 0.0
    """The same of a part that it receives, with the question where it is."""
    question_s: float = 0.0
    """Seconds of the learner's loop for a question where parts are."""
    times_tracker: bool = False
    """Whether a question also takes what the tracker takes here to answer it: it looks at all hosts."""
    digest_bytes_per_s: float = float("inf")
    """SHA-256 of one thread; parts are verified beside what comes next."""
    ranks: int = 1
    """Ranks of the learner, each with its share of a version, a server, a loop and a tracker."""
    ranks_of_a_host: int = 1
    """Ranks that share a link."""

    def sent_s(self, size_bytes: int) -> float:
        """Return what a part takes of a rank's server."""
        link_s = size_bytes * min(self.ranks, self.ranks_of_a_host) / self.link_bytes_per_s
        return max(link_s, size_bytes * self.sending_s + self.served_part_s)

    def fetched_s(self, size_bytes: int) -> float:
        """Return what a part takes of an actor that receives it, whose share of time is one rank's."""
        loop_s = size_bytes * self.receiving_s + self.fetched_part_s
        return self.ranks * max(size_bytes / self.link_bytes_per_s, loop_s)

    def passed_on_s(self, size_bytes: int) -> float:
        """Return the same of one that sends a part while another comes in."""
        loop_s = size_bytes * (self.sending_s + self.receiving_s) + self.served_part_s + self.fetched_part_s
        return self.ranks * max(size_bytes / self.link_bytes_per_s, loop_s)


@dataclass(eq=False)
class _Transfer:
    """A part on its way to a host."""

    host: int
    part: int
    left_bytes: int
    """Bytes that are still to be sent."""


@dataclass(eq=False)
class _Uplink:
    """A server, which sends pieces one after another, of each transfer in turn."""

    takes_s: Callable[[int], float]
    """What a part of a size takes."""
    waiting: deque[_Transfer] = field(default_factory=deque)
    """The first of them is being sent."""


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
    """Hosts that take one blob from each other and from the learner, by a clock of their own.

    Ranks are alike, so one is simulated, to whose share hosts give an equal part of their links and loops.
    Where ranks have few parts that is too long: a host that sends for one of them gives it all."""

    def __init__(self, machine: Machine, hosts: int, size_bytes: int, part_bytes: int) -> None:
        """The blob has `size_bytes` in all ranks together."""
        self._machine = machine
        whole, rest = divmod(max(1, size_bytes // machine.ranks), part_bytes)
        self._parts = [part_bytes] * whole + [rest] * (rest > 0)
        self._piece_bytes = -(-part_bytes // PIECES)
        self._now, self._free_s = 0.0, 0.0
        self._tracker = PartTracker(lambda: self._now)
        self._hosts = [_Host(bytearray([LACKED] * len(self._parts))) for _ in range(hosts)]
        self._uplinks = {"": _Uplink(machine.sent_s)}
        self._uplinks |= {_url(n): _Uplink(machine.passed_on_s) for n in range(hosts)}
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
        question = PartsAsked(blob="b", host=str(n), url=_url(n), have=bytes(host.states))
        began_s = time.thread_time()
        sources = self._tracker.sources(question, self._parts[0])
        took_s = time.thread_time() - began_s if self._machine.times_tracker else 0.0
        answered_s = max(self._now, self._free_s) + self._machine.question_s + took_s
        self._free_s = host.asks_until_s = answered_s
        for source in sources:
            host.states[source.part], host.begun_s[source.part] = FETCHED, self._free_s
            self._at(self._free_s, "begin", (source.url, n, source.part))
        if LACKED in host.states or FETCHED in host.states:
            self._ask_at(n, self._free_s + swarm.POLL_S)

    def _begin(self, begun: tuple[str, int, int]) -> None:
        url, n, part = begun
        uplink = self._uplinks[url]
        uplink.waiting.append(_Transfer(n, part, self._parts[part]))
        if len(uplink.waiting) == 1:
            self._send(uplink)

    def _send(self, uplink: _Uplink) -> None:
        piece_bytes = min(uplink.waiting[0].left_bytes, self._piece_bytes)
        piece_s = uplink.takes_s(self._parts[0]) * piece_bytes / self._parts[0]
        self._at(self._now + piece_s, "sent", uplink)

    def _sent(self, uplink: _Uplink) -> None:
        """Go on with the next transfer; the link of a reader delivers one part after another."""
        transfer = uplink.waiting.popleft()
        transfer.left_bytes -= self._piece_bytes
        if transfer.left_bytes > 0:
            uplink.waiting.append(transfer)
        if uplink.waiting:
            self._send(uplink)
        if transfer.left_bytes <= 0:
            self._deliver(transfer)

    def _deliver(self, transfer: _Transfer) -> None:
        host, size_bytes = self._hosts[transfer.host], self._parts[transfer.part]
        begun_s = host.begun_s[transfer.part]
        host.due_s = max(host.due_s, begun_s) + self._machine.fetched_s(size_bytes)
        verified_s = size_bytes / self._machine.digest_bytes_per_s
        self._at(max(self._now, host.due_s) + verified_s, "had", (transfer.host, transfer.part))

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
    apply_bytes_per_s: float = 14.5e9
    """Making all weights of a delta and those before, in host memory: by 8 threads on 16 cores of an H200's
    host it was 14.0 to 15.1."""
    load_bytes_per_s: float = 240e9
    """Writing the changes into the weights on one GPU, which stands still meanwhile: 33 ms of a 4B."""
    gpus: int = 8
    delta_fraction: float = 0.007
    """Size of a delta over that of all weights."""


@dataclass(frozen=True)
class Wait:
    """What training waits for at each version: each rank compares what it trains on its device, and sends
    places and new values of what changed to the ranks that publish these tensors.

    The bytes are those of `learner/publication/divided_weights.py`. The rates are not measured: an H200's
    memory at 0.7 of 4.8 TB/s, and pageable host memory over PCIe."""

    passes: float = 5.5
    """Reads and writes of a share: weights and copy are compared into a mask of half their size, which is
    counted and listed, and the copy is renewed."""
    memory_bytes_per_s: float = 0.7 * 4.8e12
    changed_fraction: float = 0.0085
    """Words that a step changes at lr 1e-6 in bfloat16 (docs/performance.md)."""
    change_bytes: int = 10
    """A place, and a word."""
    word_bytes: int = 2
    gather_bytes_per_s: float = 300e9
    """Of changes from rank to rank of a host; those for other hosts share the host's link."""
    to_host_bytes_per_s: float = 10e9

    def seconds(self, machine: Machine, size_bytes: int) -> float:
        """Return for how long training waits for a version of this size."""
        share = size_bytes / machine.ranks
        changes = share / self.word_bytes * self.changed_fraction * self.change_bytes
        of_a_host = min(machine.ranks, machine.ranks_of_a_host)
        leave = 1 - of_a_host / machine.ranks
        return (
            self.passes * share / self.memory_bytes_per_s
            + changes * (1 - 1 / machine.ranks) / self.gather_bytes_per_s
            + changes * of_a_host * leave / machine.link_bytes_per_s
            + changes / self.to_host_bytes_per_s
        )


def version_s(
    machine: Machine, work: Work, hosts: int, size_bytes: int, wait: Wait | None = None
) -> dict[str, float]:
    """Return the seconds of each stage of a delta, those for which training waits, and those until a first
    version is everywhere."""
    delta_bytes = int(work.delta_fraction * size_bytes)
    learners = max(1, machine.ranks // machine.ranks_of_a_host)
    found = {
        "wait_s": (wait or Wait()).seconds(machine, size_bytes),
        "announced_s": (size_bytes / work.code_bytes_per_s + delta_bytes / work.write_bytes_per_s) / learners,
        "received_s": received_s(machine, hosts, delta_bytes),
        "applied_s": size_bytes / work.apply_bytes_per_s,
        "pause_s": size_bytes / work.gpus / work.load_bytes_per_s,
    }
    serving_s = found["received_s"] + found["applied_s"] + found["pause_s"]
    found |= {"serving_s": serving_s, "first_written_s": size_bytes / work.write_bytes_per_s / learners}
    return found | {"first_received_s": received_s(machine, hosts, size_bytes)}


def received_s(machine: Machine, hosts: int, size_bytes: int, part_bytes: int | None = None) -> float:
    """Return the seconds until all hosts have a blob, in parts of this size or of the product's."""
    part_bytes = part_bytes or part_bytes_of(size_bytes // machine.ranks)
    return Swarm(machine, hosts, size_bytes, part_bytes).run()


def part_bytes_of(size_bytes: int) -> int:
    """Return the size of the parts of a blob of this size."""
    blocks, a_part = -(-size_bytes // BLOCK_BYTES), 1
    while -(-blocks // a_part) > MOST_PARTS:
        a_part *= 2
    return a_part * BLOCK_BYTES


def _url(n: int) -> str:
    return f"http://10.0.0.{n}:1"
