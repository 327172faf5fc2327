"""The ranks of one learner, led by rank 0: each command is carried out by all of them, in the same order."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import cast

import structlog
from pydantic import JsonValue
from torch import Tensor

from bus.codec import Message, decode, encode
from bus.requests import BatchLease, GroupRef
from learner.backends.base import StepResult
from learner.data.balancing import balanced, group_flops
from learner.data.batches import StepBatch
from learner.publication.host_copy import Copied
from learner.settings import LearnerSettings
from learner.world.channel import Channel
from learner.world.commands import (
    COMMANDS,
    Begin,
    Command,
    End,
    Export,
    Fetch,
    MakeRoom,
    Save,
    Saved,
    Train,
    WarmUp,
)
from learner.world.rank import Rank

log = structlog.get_logger()
BEAT_S = 1.0


class World:
    """All ranks: rank 0 commands, by the methods that return something, and the others `follow`."""

    def __init__(self, channel: Channel, rank: Rank, settings: LearnerSettings) -> None:
        self.rank = rank
        self._channel = channel
        self._settings = settings

    @asynccontextmanager
    async def led(self, stop: asyncio.Event) -> AsyncIterator[None]:
        """Keep the other ranks listening inside, and let them go at the end.

        Sets `stop` when any of them was told to stop. Raises `WorldError` when one is gone.
        """
        async with asyncio.TaskGroup() as tasks:
            beating = tasks.create_task(self._beat(stop), name="heartbeat of the world")
            yield
            beating.cancel()
            with suppress(asyncio.CancelledError):
                await beating
            self.rank.forget()
            await self._tell(End())

    async def fetch(self, lease: BatchLease) -> None:
        """Divide the groups of a step; return when this rank's are here, while the others fetch theirs."""
        shares = divided(lease.groups, self.rank.shares, self._cost)
        command = Fetch(step=lease.step, shares=shares)
        await self._tell(command)
        self.rank.fetch(command)
        await self.rank.fetched(lease.step)

    async def train(self, step: int, policy_version: int) -> tuple[StepBatch, StepResult]:
        """One optimizer step on the groups fetched for it."""
        command = Train(step=step, policy_version=policy_version)
        await self._tell(command)
        return await self.rank.train(command)

    async def warm_up(self, step: int) -> StepResult:
        """One optimizer step on demonstrations."""
        command = WarmUp(step=step)
        await self._tell(command)
        return await self.rank.warm_up(command)

    async def begin(self, command: Begin) -> None:
        """Make ready for a stage."""
        await self._tell(command)
        await self.rank.begin(command)

    async def export(self) -> dict[str, Tensor]:
        """Copies of the weights by Hugging Face name."""
        await self._tell(Export())
        return await self.rank.export()

    async def copy_weights(self) -> Copied:
        """The weights on their way to the host, to be published; they stay until the copy after the next."""
        await self._tell(Export())
        return await self.rank.copy_weights()

    async def make_room(self) -> None:
        """Leave to others what the next step does not need of the devices."""
        await self._tell(MakeRoom())
        await self.rank.make_room()

    async def save(self, step: int, extra: Mapping[str, JsonValue]) -> None:
        """Begin a checkpoint that holds `extra`."""
        await self._tell(Save(step=step))
        await self.rank.save(step, extra)

    async def saved(self) -> None:
        """Return when the checkpoint begun last survives a power cut."""
        await self._tell(Saved())
        await self.rank.saved()

    async def follow(self) -> None:
        """On any other rank: do what rank 0 says until it ends the world.

        Raises `WorldError` when rank 0 is gone.
        """
        commands: asyncio.Queue[Message] = asyncio.Queue()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen(commands), name="hear commands")
            while not isinstance(command := await commands.get(), End):
                await _carry_out(cast(Command, command), self.rank)
            self.rank.forget()

    async def _listen(self, commands: asyncio.Queue[Message]) -> None:
        """Fetching begins at once, while a step is trained; all else waits for its turn."""
        command: Message | None = None
        while not isinstance(command, End):
            data = await self._channel.receive()
            command = decode(data, *COMMANDS) if data else None
            if isinstance(command, Fetch):
                self.rank.fetch(command)
            elif command is not None:
                commands.put_nowait(command)

    def _cost(self, group: GroupRef) -> float:
        """What a group costs a rank; storage that does not count tokens takes all groups for equal."""
        if self._settings.learner.batch.balance == "flops" and group.tokens:
            return group_flops(self.rank.hf_config, group.tokens, self._settings.samples_per_prompt)
        return max(1, group.tokens)

    async def _tell(self, command: Command) -> bool:
        return await self._channel.send(encode(command))

    async def _beat(self, stop: asyncio.Event) -> None:
        while True:
            if await self._channel.send(b"") and not stop.is_set():
                log.info("world_stops", why="one of its ranks was told to")
                stop.set()
            await asyncio.sleep(BEAT_S)


def divided(
    groups: Sequence[GroupRef], parts: int, cost: Callable[[GroupRef], float]
) -> tuple[tuple[GroupRef, ...], ...]:
    """Whole groups for each of `parts`: an advantage needs all siblings, so they stay together."""
    shares = balanced([cost(group) for group in groups], parts)
    return tuple(tuple(groups[n] for n in share) for share in shares)


async def _carry_out(command: Command, rank: Rank) -> None:
    match command:
        case Train():
            await rank.train(command)
        case WarmUp():
            await rank.warm_up(command)
        case Begin():
            await rank.begin(command)
        case Export():
            await rank.export()
        case MakeRoom():
            await rank.make_room()
        case Save():
            await rank.save(command.step, {})
        case Saved():
            await rank.saved()
        case _:
            raise RuntimeError(f"nobody carries out {command.tag}")
