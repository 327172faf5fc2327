"""Rollouts that an actor does not end: their turns are kept for whoever rolls their leases out next."""

import asyncio
from collections.abc import Collection

from actors.group import Group
from actors.group_config import InterruptionConfig
from actors.leases import PolicyLeases
from actors.policy.rollout_turns import RolloutTurns, TurnsByRollout
from actors.turn_messages import turn_message, turns_by_rollout
from bus.errors import HandBackError


class Interruption:
    """Interrupts the rollouts of an actor that is to end, and keeps turns of those that go on for long."""

    def __init__(
        self, leases: PolicyLeases, turns: TurnsByRollout, *, actor: str, share_after_s: float | None
    ) -> None:
        """`share_after_s` is the actor's setting for finished rollouts: None keeps them to itself."""
        self.config = InterruptionConfig()
        """How long rollouts may go on, and how often their turns are kept."""
        self.event = asyncio.Event()
        """Set once the rollouts under way are to be interrupted."""
        self._leases = leases
        self._turns = turns
        self._actor = actor
        self._share_after_s = share_after_s

    @property
    def every_s(self) -> float | None:
        """Return the time between two moments at which turns are kept, if they are."""
        return self.config.keep_turns_every_s

    async def run(self, stop: asyncio.Event) -> None:
        """Interrupt what is under way when it has had its time after `stop`."""
        await stop.wait()
        await asyncio.sleep(self.config.finish_within_s)
        self.event.set()

    async def interrupt(self, group: Group, samples: Collection[int]) -> None:
        """Cut these rollouts of a group short. Raises `HandBackError`, always: others may have the lease."""
        async with asyncio.TaskGroup() as tasks:
            for _, turns in self._of(group, samples):
                tasks.create_task(turns.interrupt())
        raise HandBackError(
            f"{len(samples)} rollouts of lease {group.lease.lease_id} had not ended "
            f"{self.config.finish_within_s:g} s after this actor was stopped"
        )

    async def take_over(self, group: Group) -> None:
        """Put into the group what other actors left of it: siblings that are stored, and turns."""
        found = await self._leases.stored(group.lease)
        if group.each is not None:
            group.stored = found
            self._leases.counts["reused"] += len(found.samples)
        if found.turns:
            group.left = turns_by_rollout(await self._leases.kept_turns(group.lease))

    async def keep_when_due(self, group: Group, version: int) -> None:
        """Keep the turns that are new, if it is time to."""
        if group.keeps_turns_in_s(self.every_s) == 0:
            await self.keep_turns(group, version)

    async def hand_on(self, group: Group, version: int) -> None:
        """Store what there is of a group that is handed back: finished siblings, and turns of the others."""
        if group.may_be_shared(self._share_after_s):
            await self._leases.publish(group)
        await self.keep_turns(group, version)
        if stored := sum(turns.number_stored for _, turns in self._kept(group)):
            await self._leases.turns_stored(group.lease, stored)

    async def keep_turns(self, group: Group, version: int) -> None:
        """Send the turns that no shard has. Those of weights older than `version` are of no use."""
        group.turns_kept_s = asyncio.get_running_loop().time()
        new = [(sample, turns, turns.unstored(since=version)) for sample, turns in self._kept(group)]
        messages = [
            turn_message(turn, group.lease, sample, self._actor) for sample, _, found in new for turn in found
        ]
        if messages and await self._leases.keep_turns(group.lease, messages):
            for _, turns, found in new:
                turns.stored(found)

    def _kept(self, group: Group) -> list[tuple[int, RolloutTurns]]:
        """Return the rollouts whose turns are worth keeping: that neither failed nor were sent whole."""
        return self._of(group, [n for n in group.missing if n not in group.sent and n not in group.failures])

    def _of(self, group: Group, samples: Collection[int]) -> list[tuple[int, RolloutTurns]]:
        found = ((sample, self._turns.of(group.rollout(sample))) for sample in samples)
        return [(sample, turns) for sample, turns in found if turns is not None]
