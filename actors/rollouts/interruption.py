"""Rollouts that an actor does not end: their turns are kept for whoever rolls their leases out next."""

import asyncio
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import structlog

from actors.engines.base import Generation
from actors.policy.rollout_turns import RolloutTurns, SampledTurn, TurnsByRollout
from actors.rollouts.group import Group
from actors.rollouts.leases import PolicyLeases
from actors.settings.groups import InterruptionConfig
from bus.errors import HandBackError
from bus.messages import Lease
from bus.older_kv import kv_versions_from, older_kv_bytes
from bus.trajectory import KeptTurn
from bus.waiting import cancelled

log = structlog.get_logger()
HAND_ON_S = 30.0
"""Longest time that it takes to store what there is of a group that is handed back."""


class Interruption:
    """Interrupts the rollouts of an actor that is to end, and keeps turns of those that go on for long."""

    def __init__(
        self, leases: PolicyLeases, turns: TurnsByRollout, config: InterruptionConfig, *,
        actor: str, share_after_s: float | None,
    ) -> None:  # fmt: skip
        """`share_after_s` is the actor's setting for finished rollouts: None keeps them to itself."""
        self.config = config
        self.event = asyncio.Event()
        """Set once the rollouts under way are to be interrupted."""
        self.engines_are_lost = False
        """Whether a lease ended because no engine is left, which ends all others too."""
        self._handing_on = set[asyncio.Task[None]]()
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
        """Put into the group what other actors left of it: siblings that are stored, and turns. A rollout
        with turns of weights too old for the group would be thrown away at its end."""
        found = await self._leases.stored(group.lease)
        if group.each is not None:
            group.stored = found
            self._leases.counts["reused"] += len(found.samples)
        if found.turns:
            left = turns_by_rollout(await self._leases.kept_turns(group.lease))
            group.left = {
                sample: [turn for turn in turns if turn.is_of_use(group.version)]
                for sample, turns in left.items()
            }

    async def keep_when_due(self, group: Group) -> None:
        if group.keeps_turns_in_s(self.every_s) == 0:
            await self.keep_turns(group)

    def hand_on(self, group: Group) -> "asyncio.Task[None]":
        """Begin to store what there is of a group that is handed back: finished siblings, and turns of the
        others. The task goes on when its lease is cancelled, and may be waited for by `handed_on`."""
        task = asyncio.create_task(self._hand_on(group, self._kept(group)), name="hand on")
        self._handing_on.add(task)
        task.add_done_callback(self._handing_on.discard)
        return task

    async def handed_on(self) -> None:
        try:
            if self._handing_on:
                await asyncio.wait(self._handing_on, timeout=HAND_ON_S)
        finally:
            await cancelled(*self._handing_on)

    async def _hand_on(self, group: Group, kept: Sequence[tuple[int, RolloutTurns]]) -> None:
        """Do what `hand_on` says. `kept` are the rollouts' turns, which the actor forgets meanwhile."""
        try:
            async with asyncio.timeout(HAND_ON_S):
                shares = group.may_be_shared(self._share_after_s)
                if shares and await self._leases.publish_soon(group):
                    kept = [(sample, turns) for sample, turns in kept if sample not in group.sent]
                await self._send(group, kept)
                if stored := sum(turns.number_stored for _, turns in kept):
                    await self._leases.turns_stored(group.lease, stored)
        except TimeoutError:
            log.warning("lease_not_handed_on", lease_id=group.lease.lease_id, waited_s=HAND_ON_S)

    async def keep_turns(self, group: Group) -> None:
        """Send the turns that no shard has. Those of weights too old for the group are of no use."""
        await self._send(group, self._kept(group))

    async def _send(self, group: Group, kept: Sequence[tuple[int, RolloutTurns]]) -> None:
        group.turns_kept_s = asyncio.get_running_loop().time()
        new = [(sample, turns, turns.unstored(since=group.version)) for sample, turns in kept]
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


def turn_message(turn: SampledTurn, lease: Lease, rollout: int, actor: str) -> KeptTurn:
    sampled, routed = turn.generation, turn.generation.routed_experts
    layers, per_token = (0, 0) if routed is None else routed.shape[1:]
    return KeptTurn(
        lease_id=lease.lease_id,
        rollout=rollout,
        number=turn.number,
        context=turn.context,
        finish_reason=sampled.finish_reason,
        token_ids=sampled.token_ids.astype(np.int32, copy=False),
        behaviour_logprobs=sampled.logprobs.astype(np.float32, copy=False),
        policy_versions=sampled.policy_versions.astype(np.int32, copy=False),
        trained=turn.trained,
        actor=actor,
        run=lease.run,
        routed_experts=b"" if routed is None else routed.tobytes(),
        moe_layers=layers,
        experts_per_token=per_token,
        expert_bytes=1 if routed is None else routed.itemsize,
        kept_counts=b"" if sampled.kept is None else sampled.kept.counts.tobytes(),
        kept_tokens=b"" if sampled.kept is None else sampled.kept.token_ids.tobytes(),
        older_kv=older_kv_bytes(sampled.kv_versions, sampled.policy_versions),
    )


def turns_by_rollout(messages: Iterable[KeptTurn]) -> dict[int, list[SampledTurn]]:
    """Return the turns in these messages, which are of one lease, by rollout."""
    found: dict[int, list[SampledTurn]] = {}
    for message in messages:
        routed = np.frombuffer(message.routed_experts, "u1" if message.expert_bytes == 1 else "<u2")
        shape = -1, message.moe_layers, message.experts_per_token
        generation = Generation(
            message.token_ids,
            message.behaviour_logprobs,
            message.policy_versions,
            message.finish_reason,
            routed.reshape(shape) if len(routed) else None,
            message.kept_sets,
            kv_versions_from(message.older_kv, message.policy_versions),
        )
        turn = SampledTurn(message.number, message.context, generation, message.trained)
        found.setdefault(message.rollout, []).append(turn)
    return found
