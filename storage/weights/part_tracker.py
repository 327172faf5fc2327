"""Tells hosts where to get parts of blobs: from each other first, and each part from the learner once."""

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import structlog

from bus.errors import BusError
from bus.weight_requests import BlobAccess, PartsAsked, PartSource

log = structlog.get_logger()
ORIGIN = ""
"""URL that stands for the learner's own server."""
AT_ONCE = 4
"""Parts that a host fetches at a time."""
MOST_READERS = 8
"""Parts that are fetched from a host at a time; who wants more waits until others have them too."""
BUSY_S = 1.0
"""Seconds for which a part that the learner sends counts as one of so many: few are soon with hosts that pass
them on, and slow readers hold up nobody."""
SILENT_S = 5.0
"""Seconds after which what a host was told to fetch is told to another, unless it is heard."""
SLOW_S = 15.0
"""Seconds after which a part that a host is still fetching is told to another too; more for a large one."""
SLOWEST_BYTES_PER_S = 2 << 20
"""Bandwidth at which a host has to send a large part."""
SERVED_S = 60.0
"""Seconds for which a host serves what it has after it was heard last."""
AVOIDED_S = 60.0
"""Seconds for which a server is avoided after it failed."""
ORIGIN_AVOIDED_S = 1.0
"""The same of the learner's own server."""
MOST_HOSTS = 20_000
"""Hosts that are known of all blobs together, so that no flood of names fills the learner's memory."""
ACCUSERS = 2
"""Hosts for which a server has to fail before no host is sent there any more."""
LACKED, HAD, FETCHED = range(3)
"""States of a part at a host (`PartsAsked.have`)."""


@dataclass(slots=True)
class _Host:
    url: str
    access: BlobAccess | None
    place: str
    have: bytes
    heard_s: float
    fetches: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Parts that it was told to fetch, where, and when."""
    avoids: dict[str, float] = field(default_factory=dict)
    """Servers that failed for the host, and until when they are avoided."""


class PartTracker:
    """Knows which host has which part, from what they say when they ask.

    A part goes to a place once, from the nearest that has it, and from the learner once in all, while hosts
    go on answering."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._hosts: defaultdict[tuple[str, int], dict[str, _Host]] = defaultdict(dict)
        """Hosts by blob and its number of parts."""
        self._accusers: defaultdict[str, dict[str, float]] = defaultdict(dict)
        """Hosts for which a server failed, and until when that counts."""

    def sources(self, asked: PartsAsked, part_bytes: int) -> tuple[PartSource, ...]:
        """Take note of what a host says, and return where it gets parts that it lacks, a few at a time.
        Raises `BusError` when there are too many hosts."""
        now = self._clock()
        self._forget(now)
        host = self._noted(asked, now)
        if LACKED not in asked.have:
            return ()
        others = [one for name, one in self._hosts[asked.blob, len(asked.have)].items() if name != asked.host]
        active = [one for one in others if now - one.heard_s < SILENT_S]
        load = Counter(url for one in active for url, _ in one.fetches.values())
        places = {one.url: one.place for one in others}
        taken = _taken(host, active, places, now - SLOW_S - part_bytes / SLOWEST_BYTES_PER_S)
        fetches = (fetch for one in active for fetch in one.fetches.values())
        from_learner = sum(url == ORIGIN and since_s > now - BUSY_S for url, since_s in fetches)
        serving = [one for one in others if one.url and self._may_ask(host, one.url, now)]
        lacking = [part for part, state in enumerate(asked.have) if state == LACKED]
        random.shuffle(lacking)  # so that hosts that begin together have different parts for each other
        found: list[PartSource] = []
        for part in lacking:
            if len(host.fetches) >= AT_ONCE:
                break
            having = [one for one in serving if one.have[part] == HAD]
            near = [one for one in having if one.place == host.place]
            best = min(near or having, key=lambda one: load[one.url], default=None)
            if best is None:
                is_busy = from_learner >= MOST_READERS or now < host.avoids.get(ORIGIN, now)
                waits = part in taken or is_busy
            else:
                waits = load[best.url] >= MOST_READERS or (not near and part in taken)
            if waits:
                continue
            url, access = (best.url, best.access) if best is not None else (ORIGIN, None)
            source = PartSource(part=part, url=url, access=access)
            load[url] += 1
            from_learner += url == ORIGIN
            host.fetches[part] = url, now
            found.append(source)
        return tuple(found)

    def _noted(self, asked: PartsAsked, now: float) -> _Host:
        known = self._hosts[asked.blob, len(asked.have)]
        host = known.get(asked.host)
        if host is None:
            if sum(map(len, self._hosts.values())) >= MOST_HOSTS:
                raise BusError(f"{MOST_HOSTS} hosts ask for weights already: ask again in {SERVED_S:g} s")
            place = _place(asked.url)
            host = known[asked.host] = _Host(asked.url, asked.access, place, asked.have, now)
        host.have, host.heard_s = asked.have, now
        host.fetches = {part: told for part, told in host.fetches.items() if asked.have[part] == FETCHED}
        host.avoids = {url: until for url, until in host.avoids.items() if until > now}
        for failed in asked.failed:
            if failed.url and all(failed.url != one.url for one in known.values()):  # nobody was sent there
                continue
            host.avoids[failed.url] = now + (AVOIDED_S if failed.url else ORIGIN_AVOIDED_S)
            if failed.url:
                log.warning(
                    "host_of_weights_avoided", url=failed.url, by=asked.host, is_damaged=failed.is_damaged
                )
                self._accusers[failed.url][asked.host] = now + AVOIDED_S
        return host

    def _may_ask(self, host: _Host, url: str, now: float) -> bool:
        accusers = sum(until > now for until in self._accusers[url].values()) if url in self._accusers else 0
        return accusers < ACCUSERS and host.avoids.get(url, now) <= now

    def _forget(self, now: float) -> None:
        for blob, hosts in list(self._hosts.items()):
            for name in [name for name, one in hosts.items() if now - one.heard_s > SERVED_S]:
                del hosts[name]
            if not hosts:
                del self._hosts[blob]
        for url, accusers in list(self._accusers.items()):
            if max(accusers.values()) <= now:
                del self._accusers[url]


def _taken(host: _Host, active: list[_Host], places: Mapping[str, str], slow_s: float) -> set[int]:
    """Return the parts that others fetch for the place of `host`, or from the learner for all. Those are not
    meant that they fetch since before `slow_s`."""
    return {
        part
        for one in active
        for part, (url, since_s) in one.fetches.items()
        if one.url and since_s > slow_s
        and (url == ORIGIN or (one.place == host.place and places.get(url) != host.place))
    }  # fmt: skip


def _place(url: str) -> str:
    """Return what near hosts have in common: the first three numbers of their IPv4 address, or the host."""
    host = urlsplit(url).hostname or ""
    return host.rpartition(".")[0] if host.replace(".", "").isdecimal() else host
