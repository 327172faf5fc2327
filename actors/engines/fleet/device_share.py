"""When an engine may use its device, which it shares with other processes: a part of `Member`."""

import asyncio
from typing import TYPE_CHECKING

from actors.engines.base import SharesDevice
from bus.waiting import bounded, unless

if TYPE_CHECKING:
    from actors.engines.fleet.engine_state import EngineState
    from actors.engines.fleet.member import Member


class DeviceShare:
    """Lets one member use the device, except between `release` and `resume`."""

    def __init__(self, member: "Member") -> None:
        self.released = False
        """Whether the member has freed the device, or is about to."""
        self.device = asyncio.Lock()
        """Held while an engine starts, and from `release` to `resume`, so that none starts meanwhile."""
        self._member = member

    async def release(self) -> None:
        """Have the engine hand out what it has sampled and free its device; none starts until `resume`.

        An engine that is starting is waited for. One that cannot free its device has failed: it is closed."""
        if self.released:
            return
        self.released = True
        await self.device.acquire()  # its own timeouts bound how long an engine starts
        member, life = self._member, self._member._life
        if life is None:
            return
        if member.state == "serving":
            member._enter("released")
            try:
                await unless(member._out, self._free(life))
            # An engine of any kind may raise anything here. It concerns this engine alone: `fail` logs it,
            # has the engine closed and another one built, and the device is free afterwards.
            except Exception as error:  # noqa: BLE001
                member.fail(f"it did not free its device: {error!r}", of_requests=False)
        if member.state != "released" or member._out.is_set():
            await life.gone.wait()  # taking it down bounds this

    async def resume(self) -> None:
        """Take the device back, and serve with the newest weights. An engine that cannot has failed."""
        if not self.released:
            return
        member, life = self._member, self._member._life
        try:
            if life is not None and member.state == "released":
                await unless(member._out, self._take(life))
                await member._load_newest(life)
                # nothing is awaited between its last comparison and this, as when an engine begins to serve
                if member.state == "released" and not member._out.is_set():
                    member._enter("serving")
        # An engine of any kind may raise anything here, which must not keep the others from resuming:
        # `fail` logs it and has the engine built again.
        except Exception as error:  # noqa: BLE001
            member.fail(f"it did not take its device back: {error!r}", of_requests=False)
        finally:
            self.released = False
            self.device.release()

    async def _free(self, life: "EngineState") -> None:
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

    async def _take(self, life: "EngineState") -> None:
        """Weights first: an engine that has none on its device takes these with it, not the older ones."""
        member = self._member
        await member._load_newest(life)
        async with bounded(member._config.update_timeout_s, f"{member.name} did not resume"):
            if isinstance(life.engine, SharesDevice):
                await life.engine.resume()
