"""Hears which policy is announced, for an actor that fetches no more of it than evaluations need."""

import asyncio

from bus.connection import Bus
from bus.messages import PolicyManifest
from bus.waiting import set_within

POLL_S = 2.0


class AnnouncedPolicy:
    """The announced policy, by the notices of the learner and by the key that it keeps."""

    def __init__(self, bus: Bus) -> None:
        self.latest: PolicyManifest | None = None
        """Newest announcement."""
        self._bus = bus

    @property
    def stage(self) -> str:
        """Stage of the learner at its latest publication."""
        return self.latest.stage if self.latest else ""

    async def run(self, stop: asyncio.Event) -> None:
        """Listen until `stop`; the key is looked at too, since a notice may be lost."""
        listening = await self._bus.listen(self._bus.subject("notice", "policy"), PolicyManifest, self._hear)
        while not stop.is_set():
            found = await self._bus.get("policy", PolicyManifest)
            if found is not None:
                self._hear(found[0])
            await set_within(stop, POLL_S * self._bus.slower)
        await listening.unsubscribe()

    def _hear(self, manifest: PolicyManifest) -> None:
        """Take note, unless the same learner has announced a later version."""
        known = self.latest
        if (
            known is None
            or known.incarnation != manifest.incarnation
            or known.policy_version <= manifest.policy_version
        ):
            self.latest = manifest
