"""The learner's turns on devices that actors share: each from a full batch to the weights it gives."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace

import structlog

from bus.codec import Json
from bus.config import ColocationConfig
from bus.connection import Bus
from bus.device_messages import BEAT_S, HOLD_KEY, USERS, Beats, DeviceHold, DeviceUser
from bus.errors import BusError, ConfigError
from bus.waiting import set_within
from storage.disk.host_identity import host_identity

log = structlog.get_logger()
POLL_S = 0.25
"""Time from one check whether the actors have yielded to the next; notices come sooner."""
END_TIMEOUT_S = 2.0
"""Longest time to publish the end of a hold; a hold whose end is not published lapses."""


class Device:
    """Holds the devices of this host while the learner has work for them, and only then. While they are held,
    nothing may wait for an actor or storage, whose work may need the device."""

    def __init__(
        self, bus: Bus, config: ColocationConfig, *,
        incarnation: str, release_memory: Callable[[], Awaitable[None]], on_wait: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.figures: dict[str, Json] = {}
        """Figures of the latest hold, for metrics."""
        self._bus = bus
        self._config = config
        self._release_memory = release_memory
        self._on_wait = on_wait
        self._host = host_identity()
        if config.enabled and not self._host:
            raise ConfigError("colocation.enabled: this system has no boot id to tell its host by")
        self._hold = DeviceHold(incarnation=incarnation, number=0, host=self._host, held=False)
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """End the hold that an earlier learner may still have, and listen to the actors."""
        if self._config.enabled:
            await self._publish_hold()
            await self._bus.listen(
                self._bus.subject("notice", "device-user"), DeviceUser, lambda _: self._changed.set()
            )

    @asynccontextmanager
    async def held(self, stop: asyncio.Event) -> AsyncIterator[bool]:
        """Hold the devices inside, once actors have yielded them; yield False when `stop` came first. Raises
        `BusError` when an actor that is alive does not yield in time."""
        if not self._config.enabled:
            yield True
            return
        self._hold = replace(self._hold, number=self._hold.number + 1, held=True)
        ended = asyncio.Event()
        beating = asyncio.create_task(self._renew(ended), name="hold the device")
        try:
            began = time.monotonic()
            ours = await self._yielded(stop)
            self._on_wait("")
            if ours:
                self.figures = {"time/waiting_for_device_s": time.monotonic() - began}
                log.info("device_held", hold=self._hold.name, at_s=time.monotonic())
            yield ours
            if ours:
                await self._release_memory()
        finally:
            ended.set()
            await asyncio.wait([beating])
            if not beating.cancelled():
                beating.result()
            self._hold = replace(self._hold, held=False)
            log.info("device_given_back", hold=self._hold.name, at_s=time.monotonic())
            await self._give_back()

    async def _yielded(self, stop: asyncio.Event) -> bool:
        config, deadline_s = self._config, time.monotonic() + self._config.yield_timeout_s
        beats: dict[str, Beats] = {}
        users: Iterable[str] | None = None
        while not stop.is_set():
            self._changed.clear()
            try:
                if users is None:
                    await self._publish_hold()  # and then look: an actor that is not there yet will see it
                    users = await self._bus.keys(USERS)
                    beats = {key: Beats(config.lapse_s) for key in users}
                users = missing = [key for key in users if await self._uses(key, beats[key])]
            except BusError as error:
                log.warning("device_users_not_known", reason=str(error))
                missing = ["not known, since the bus does not say"]
                for beat in beats.values():
                    beat.unknown()
            if not missing:
                return True
            names = ", ".join(key.removeprefix(f"{USERS}.") for key in missing)
            self._on_wait(f"waiting for the engines of {names} to free the device")
            if time.monotonic() > deadline_s:
                raise BusError(
                    f"no free device within colocation.yield_timeout_s={config.yield_timeout_s:g}: it is "
                    f"still used by {names}. See what its log says, or raise the limit"
                )
            await set_within(self._changed, POLL_S)
        return False

    async def _uses(self, key: str, beats: Beats) -> bool:
        found = await self._bus.get(key, DeviceUser)
        if found is None:
            return False
        user, revision = found
        if user.host != self._host or user.yielded_to == self._hold.name:
            return False
        if beats.alive(revision):
            return True
        log.warning("actor_silent", actor=user.actor, consequence="its use of the device is taken for ended")
        await self._bus.delete(key)
        return False

    async def _renew(self, ended: asyncio.Event) -> None:
        while not ended.is_set():
            try:
                await self._publish_hold()
            except BusError as error:  # the actors' patience is as long as the bus is away
                log.warning("hold_not_renewed", reason=str(error))
            await set_within(ended, BEAT_S)

    async def _give_back(self) -> None:
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                found = await self._bus.get(HOLD_KEY, DeviceHold)
                if found is None or found[0].incarnation == self._hold.incarnation:  # else we were taken over
                    await self._publish_hold()
        except (TimeoutError, BusError) as error:  # the hold lapses by itself
            log.warning("hold_not_ended", reason=str(error) or "no answer")

    async def _publish_hold(self) -> None:
        await self._bus.put(HOLD_KEY, self._hold)
        await self._bus.notify(self._bus.subject("notice", "device"), self._hold)
