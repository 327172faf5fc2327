"""Tells what event loops of a learner and of an actor take for weights that pass through them, for the cost
model of `launch bench scale`."""

import asyncio
import time
from collections import defaultdict
from unittest.mock import patch

from benchmarks.swarm import RUN, TIMEOUT_S, Receiver, content, serving, url_of
from bus.config import BusConfig
from bus.connection.bus import Bus
from bus.weight_requests import PartsAsked, PartsFound
from storage.weights import blob_parts
from storage.weights.blob_http import HttpBlobs, parts_subject
from storage.weights.part_tracker import HAD

PROBE_BYTES = 64 << 20
PROBE_PARTS = 128 << 10, 8 << 20
"""Sizes of the parts of what is fetched to measure event loops."""
QUESTIONS = 200


async def loop_times(*, rounds: int) -> dict[str, float]:
    """Return the seconds that event loops take on this machine, nothing being paced: for a part and for a
    byte, by parts of two sizes, and for a question. The least of so many rounds, since other work on the
    machine adds to it."""
    took = defaultdict[str, list[float]](list)
    async with serving() as (bus, store):
        for n in range(rounds):
            took["question"].append(await _question_s(bus, store))
            for size in PROBE_PARTS:
                sent_s, received_s = await _fetched(bus, store, size, n)
                took[f"sent {size}"].append(sent_s)
                took[f"received {size}"].append(received_s)
    least = {name: min(seconds) for name, seconds in took.items()}
    served, fetched = (
        _by_part_and_byte(*(least[f"{name} {size}"] for size in PROBE_PARTS)) for name in ("sent", "received")
    )
    found = {
        "question_s": least["question"],
        "served_part_s": served[0] - least["question"],  # each part is asked for once
        "sending_s": served[1],
        "fetched_part_s": fetched[0],
        "receiving_s": fetched[1],
    }
    return {name: float(f"{max(0.0, seconds):.3g}") for name, seconds in found.items()}


def _by_part_and_byte(many_s: float, few_s: float) -> tuple[float, float]:
    """Divide what the same bytes took in many parts and in few."""
    many, few = (PROBE_BYTES // size for size in PROBE_PARTS)
    a_part_s = (many_s - few_s) / (many - few)
    return a_part_s, (few_s - few * a_part_s) / PROBE_BYTES


async def _fetched(bus: Bus, store: HttpBlobs, part_bytes: int, n: int) -> tuple[float, float]:
    """Return the processor time of this process's loop and of a host's for a blob that it fetches."""
    with patch.object(blob_parts, "BLOCK_BYTES", part_bytes):
        ref = await store.put(content(PROBE_BYTES), "probe", part_bytes, n)
    host = Receiver(url_of(bus), ref, passes_on=True)
    await host.start()
    began_s = time.thread_time()
    await host.fetch()
    took_s = time.thread_time() - began_s
    await host.kill()
    await store.delete(ref)
    return took_s, host.loop_s


async def _question_s(bus: Bus, store: HttpBlobs) -> float:
    """Return what this process's loop takes for a question of another thread, beside the tracker."""
    ref = await store.put(content(PROBE_BYTES), "asked")
    subject, url = parts_subject(bus, ref.origin), url_of(bus)

    async def ask() -> None:
        async with Bus.connect(BusConfig(url=url), RUN, name="asks") as other:
            asked = PartsAsked(blob=ref.subject, host="asks", url="", have=bytes([HAD] * ref.parts))
            for _ in range(QUESTIONS):
                await other.request(subject, asked, PartsFound, timeout_s=TIMEOUT_S)

    began_s = time.thread_time()
    await asyncio.to_thread(lambda: asyncio.run(ask()))
    return (time.thread_time() - began_s) / QUESTIONS
