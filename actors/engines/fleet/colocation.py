"""An actor's part in sharing its host's devices with the learner: its engines free them when that asks."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
import torch

from actors.engines.fleet.fleet import Fleet
from actors.settings.engines import EngineConfig
from bus.config import ColocationConfig
from bus.connection import Bus
from bus.device_messages import BEAT_S, HOLD_KEY, Beats, DeviceHold, DeviceUser, user_key
from bus.errors import BusError, ConfigError
from bus.waiting import set_within
from storage.disk.host_identity import host_identity

log = structlog.get_logger()
LAST_WORDS_S = 2.0
"""An actor that ends waits no longer for the bus to take its word back."""


def able_to_release(engine: EngineConfig) -> EngineConfig:
    """Return the engine's settings, with what lets it free its memory on CUDA."""
    settings = engine.servers.settings
    device = settings.get("device", "cuda" if torch.cuda.is_available() else "cpu")
    if engine.in_process or device != "cuda":
        return engine
    return engine.model_copy(update={"server": {**settings, "enable_memory_saver": True}})


class DeviceSharing:
    """Frees the devices while the learner holds them and reports that; a hold that is not renewed is over."""

    def __init__(self, bus: Bus, engines: Fleet, config: ColocationConfig, *, actor: str) -> None:
        self.released = False
        """Whether the engines have freed the device, or are about to."""
        self._bus = bus
        self._engines = engines
        self._actor = actor
        self._host = host_identity()
        if not self._host:
            raise ConfigError("colocation.enabled: this system has no boot id to tell its host by")
        self._beats = Beats(config.lapse_s)
        self._last: DeviceHold | None = None
        self._revision = 0
        self._yielded_to = ""
        self._news, self._changed, self._ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def active(self) -> AsyncIterator[None]:
        """Share the device inside, where engines may start: they wait for a hold there is already to end."""
        # Each says that it wants the device and then looks, so that the first is seen by the other.
        await self._bus.put(user_key(self._actor), self._said())
        listening = await self._bus.listen(self._bus.subject("notice", "device"), DeviceHold, self._hear)
        await self._obey(await self._wanted())
        async with asyncio.TaskGroup() as tasks:
            loops = [tasks.create_task(self._beat()), tasks.create_task(self._follow())]
            try:
                yield
            finally:
                self._ended.set()  # too: an answer from the bus that comes just then hides a cancellation
                for task in loops:
                    task.cancel()
                await self._take_leave()
                await listening.unsubscribe()

    async def _follow(self) -> None:
        while not self._ended.is_set():
            self._news.clear()
            await self._obey(await self._wanted())
            await set_within(self._news, BEAT_S)

    async def _wanted(self) -> DeviceHold | None:
        try:
            found = await self._bus.get(HOLD_KEY, DeviceHold)
        except BusError as error:
            log.warning("hold_not_known", reason=str(error))
            self._beats.unknown()
        else:
            if found is not None:  # else the bus lost it: the learner says it again, or is gone
                self._last, self._revision = found
        hold = self._last
        if hold is None or not hold.held or hold.host != self._host:
            return None
        if self._beats.alive(self._revision):
            return hold
        if self.released:
            log.warning("learner_silent", hold=hold.name, consequence="the engines take the device back")
        return None

    async def _obey(self, hold: DeviceHold | None) -> None:
        if hold is not None and hold.name != self._yielded_to:
            if not self.released:
                self.released = True
                await self._engines.release()
                log.info(
                    "device_yielded",
                    hold=hold.name,
                    tokens=self._engines.tokens_generated,
                    at_s=time.monotonic(),
                )
            self._say(hold.name)
        elif hold is None and self.released:
            log.info(
                "device_taken_back",
                hold=self._yielded_to,
                tokens=self._engines.tokens_generated,
                at_s=time.monotonic(),  # of the host's clock, as the learner's
            )
            self._say("")
            await self._engines.resume()
            self.released = False

    def _say(self, yielded_to: str) -> None:
        self._yielded_to = yielded_to
        self._changed.set()

    def _said(self) -> DeviceUser:
        return DeviceUser(actor=self._actor, host=self._host, yielded_to=self._yielded_to)

    async def _beat(self) -> None:
        """Say how the actor stands, at once when that changes."""
        while not self._ended.is_set():
            self._changed.clear()
            try:
                await self._bus.put(user_key(self._actor), self._said())
                await self._bus.notify(self._bus.subject("notice", "device-user"), self._said())
            except BusError as error:
                log.warning("device_use_not_said", reason=str(error))
            await set_within(self._changed, BEAT_S)

    async def _take_leave(self) -> None:
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await self._bus.delete(user_key(self._actor))
        except (TimeoutError, BusError) as error:  # the key lapses by itself
            log.warning("device_use_not_ended", reason=str(error) or "no answer")

    def _hear(self, hold: DeviceHold) -> None:
        self._news.set()
