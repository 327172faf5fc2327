"""`launch verify`: accounts for every trajectory of a run, by id and digest."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import nats.errors
from nats.js.errors import NotFoundError

from bus.codec import Json
from bus.connection.bus import Bus
from bus.errors import SluiceError
from launch.settings.run_config import RunConfig
from launch.verify.comparison import BROKEN, VERDICTS, Verdicts, compare
from launch.verify.evidence import Acknowledgement, Evidence, collect, place_of
from storage.disk.run_directory import RunDirectory

CONNECT_S = 1.5
"""Longest time to wait for the bus, which need not be there."""
LOOKS = 5
"""Times that a run which goes on is read: what is missing may have been stored while it was read."""
PAUSE_S = 1.0
SHOWN = (*BROKEN, "not_verifiable", "re_rolled", "never_acknowledged")
"""Verdicts whose trajectories are on the screen, with the reason."""
NAMED = 10
"""Most things that a line of the screen names."""
NOT_ASKED = "the bus was not asked"
REMEDY = "give operator.creds with --creds"


class OnBus:
    """Knows which messages are still on the streams of trajectories."""

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._known: dict[tuple[str, int], bool] = {}
        self.silence = NOT_ASKED
        """Why the bus did not tell of each message whether it has it; empty if it did."""

    def __call__(self, answer: Acknowledgement) -> bool | None:
        """Tell whether a message is there; None if the bus was not asked."""
        return self._known.get(place_of(answer, self._shards))

    async def ask(self, bus: Bus, answers: Sequence[Acknowledgement]) -> None:
        """Ask about the messages of these acknowledgements, until one question gets no answer."""
        if answers and bus.signatures is not None and bus.signatures.role != "operator":
            self.silence = f"the bus does not tell a key of {bus.signatures.role} what it holds: {REMEDY}"
            return
        for stream, sequence in {place_of(answer, self._shards) for answer in answers}:
            try:
                await bus.js.get_msg(bus.topology.stream(stream), sequence)
            except NotFoundError:
                self._known[stream, sequence] = False
            except nats.errors.Error as error:
                self.silence = f"the bus did not tell what it holds ({error})"
                return
            else:
                self._known[stream, sequence] = True
        self.silence = ""


async def verify_run(where: RunConfig, lists: Sequence[Path], stop: asyncio.Event) -> dict[str, Json]:
    """Compare what the actors, the store and the learner of a run say, and return `Verdicts.to_json`. The bus
    is asked for what is missing, if it is there."""
    run = RunDirectory(where.directory, where.run)
    impatient = where.bus.model_copy(update={"connect_timeout_s": CONNECT_S, "patience_s": CONNECT_S})
    async with AsyncExitStack() as stack:
        bus, silence = None, ""
        try:
            connecting = Bus.connect(impatient, where.run, name="verify", stop=stop)
            bus = await stack.enter_async_context(connecting)
        except SluiceError as error:  # the bus may be over with the run; or the credentials are wrong
            silence = f"{NOT_ASKED}: {error}"
        found = await verified(run, lists, bus=bus)
        found.bus_silence = silence or found.bus_silence
    return found.to_json() | {"run": where.run}


async def verified(
    run: RunDirectory,
    lists: Sequence[Path] = (),
    *,
    bus: Bus | None = None,
    went_with_bus: Callable[[Acknowledgement], bool] = lambda answer: False,
) -> Verdicts:
    """Compare everything that a run left, which may go on; what is missing is looked for again."""
    for look in range(LOOKS):
        if look:
            await asyncio.sleep(PAUSE_S)
        evidence = await asyncio.to_thread(collect, run, lists)
        on_bus = OnBus(evidence.shards)
        if bus is not None:
            await on_bus.ask(bus, _missing(evidence))
        verdicts = await asyncio.to_thread(compare, evidence, on_bus=on_bus, went_with_bus=went_with_bus)
        verdicts.bus_silence = on_bus.silence
        if not verdicts.is_broken:
            break
    return verdicts


def _missing(evidence: Evidence) -> list[Acknowledgement]:
    store = evidence.store.stored
    return [
        answer
        for copy, answers in evidence.before.acknowledged.items()
        if not any(one.copy == copy for one in store.get((copy.lease_id, copy.sample), ()))
        for answer in answers
    ]


def screen(found: dict[str, Json]) -> str:
    """Return the report for a terminal: a line for each verdict, those that no run may have first."""
    named = found["named"] if isinstance(found["named"], dict) else {}
    lines = [
        f"{found['run']}: {found['acknowledged']} trajectories acknowledged, {found['stored']} stored, "
        f"{found['trained']} trained on in {found['steps']} steps"
        + ("" if found["bus"] else f"; {found['bus_silence']}")
    ]
    for name, meaning in VERDICTS.items():
        if not found[name] and name not in BROKEN:
            continue
        lines.append(f"{name.replace('_', ' '):>22} {found[name]:>8}  {meaning}")
        things = named.get(name)
        if name not in SHOWN or not isinstance(things, dict):
            continue
        lines += [f"{'':>33}{what}: {why}" for what, why in list(things.items())[:NAMED]]
        if len(things) > NAMED:
            lines.append(f"{'':>33}and {len(things) - NAMED} more, which --json names")
    return "\n".join(lines)
