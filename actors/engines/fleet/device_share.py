"""When an engine may use its device, which it shares with other processes: a part of `Member`."""

import asyncio
from typing import TYPE_CHECKING

from actors.engines.base import SharesDevice
from actors.engines.fleet.engine_life import EngineLife
from actors.engines.waiting import bounded, unless

if TYPE_CHECKING:
    from actors.engines.fleet.member import Member


class Turn:
    """One member's turn on the device. It has it unless it rests."""

    def __init__(self, member: "Member") -> None:
        self.over = False
        """Whether it rests, or is about to."""
        self.device = asyncio.Lock()
        """Held while an engine starts, and from `rest` to `wake`: so none starts meanwhile."""
        self._member = member

    async def rest(self) -> None:
        """Have the engine hand out what it has sampled and free its device; none starts until `wake`.

        One that is starting is waited for. One that cannot free its device has failed, and is closed."""
        if self.over:
            return
        self.over = True
        await self.device.acquire()  # its own timeouts bound how long an engine starts
        member, life = self._member, self._member._life
        if life is None:
            return
        if member.state == "serving":
            member._enter("resting")
            try:
                await unless(member._out, self._free(life))
            except Exception as error:  # noqa: BLE001  # of this engine alone, whatever it is; it is closed
                member.fail(f"it did not free its device: {error}", of_requests=False)
        if member.state != "resting" or member._out.is_set():
            await life.gone.wait()  # taking it down bounds this

    async def wake(self) -> None:
        """Take the device back, and serve with the newest weights. An engine that cannot has failed."""
        if not self.over:
            return
        member, life = self._member, self._member._life
        try:
            if life is not None and member.state == "resting":
                await unless(member._out, self._take(life))
                await member._load_newest(life)
                # nothing is awaited between its last comparison and this, as when an engine begins to serve
                if member.state == "resting" and not member._out.is_set():
                    member._enter("serving")
        except Exception as error:  # noqa: BLE001  # of this engine alone, whatever it is
            member.fail(f"it did not take its device back: {error}", of_requests=False)
        finally:
            self.over = False
            self.device.release()

    async def _free(self, life: EngineLife) -> None:
        member, config = self._member, self._member._config
        async with bounded(config.update_timeout_s, f"{member.name} did not end its update"):
            await life.update.acquire()  # an engine that loads weights hands out nothing before that is over
        try:
            async with bounded(config.drain_timeout_s, f"{member.name} did not hand out its tokens"):
                await member._interrupt(life)
            async with bounded(config.update_timeout_s, f"{member.name} did not let it go"):
                if isinstance(life.engine, SharesDevice):
                    await life.engine.release()
        finally:
            life.update.release()

    async def _take(self, life: EngineLife) -> None:
        """Weights first: an engine that has none on its device takes these with it, not the older ones."""
        member = self._member
        await member._load_newest(life)
        async with bounded(member._config.update_timeout_s, f"{member.name} did not resume"):
            if isinstance(life.engine, SharesDevice):
                await life.engine.resume()
