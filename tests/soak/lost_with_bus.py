"""Which acknowledged trajectories a soak may have destroyed itself, when it damaged the bus's directory.

A message that the bus acknowledged and that no shard has stored yet goes with the bus's disk: its lease is
rolled out again. So before each such fault the account is taken, and says what is on the bus; all else that
is missing then was lost by something else, and stays lost however the bus is damaged afterwards."""

import time
from contextlib import suppress

import nats.errors

from bus.config import BusConfig
from bus.connection.bus import Bus
from bus.errors import SluiceError
from launch.verify.comparison import Verdicts
from launch.verify.evidence import Acknowledgement
from launch.verify.verify import verified
from storage.disk.run_directory import RunDirectory

CONNECT_S = 3.0


class LostWithBus:
    """Takes the account of a run while it goes on, and knows what its bus has lost by damage."""

    def __init__(self, run: RunDirectory, url: str) -> None:
        self._run = run
        self._bus = BusConfig(url=url, connect_timeout_s=CONNECT_S, patience_s=CONNECT_S)
        self._since_s = time.monotonic()
        """What was acknowledged from then on may be on the bus and nowhere else."""
        self._spans: list[tuple[float, float]] = []
        self.lost: dict[str, str] = {}
        """Trajectories that were seen to be lost before a fault that would have explained it, and how."""

    async def take_account(self) -> Verdicts | None:
        """Compare everything now. None if that cannot be done, such as while the bus is away."""
        began_s = time.monotonic()
        with suppress(SluiceError, nats.errors.Error, OSError, TimeoutError):
            async with Bus.connect(self._bus, self._run.name, name="soak") as bus:
                found = await verified(self._run, bus=bus, went_with_bus=self.covers)
            self._since_s = min([began_s, *(answer.at_s for answer in found.in_flight)])
            self.lost |= found.found["lost"]
            return found
        return None

    def bus_damaged(self) -> None:
        """Note that the bus's directory has been damaged just now."""
        self._spans.append((self._since_s, time.monotonic()))

    def covers(self, answer: Acknowledgement) -> bool:
        """Tell whether a message may have gone with the bus."""
        return any(since_s <= answer.at_s <= until_s for since_s, until_s in self._spans)
