"""Gives rewards to trajectories that were published without one: from Python, or in bulk from JSON Lines."""

import json
from collections.abc import AsyncIterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Self

from bus.codec import encode
from bus.connection import Bus
from bus.errors import ConfigError, SchemaError
from bus.messages import RewardGiven, RunRecord
from bus.streams.publish import Publisher, together
from bus.topology import shard_of
from storage.account.records import AccountRecord, AccountWriter, Copy, Kind

_EXAMPLE = '{"trajectory_id": "g00000012.3", "reward": 0.5}'


class RewardSender:
    """Gives rewards to one run. They wait on the bus while its storage is away."""

    def __init__(self, bus: Bus, shards: int, *, source: str = "", account: Path | None = None) -> None:
        """Give rewards as `source`, and write them down in the directory `account` for `launch verify`."""
        self._bus = bus
        self._shards = shards
        self._source = source
        self._publisher = Publisher(bus)
        self._account = None if account is None else AccountWriter(account, source)

    @classmethod
    async def to_run(cls, bus: Bus, *, source: str = "", account: Path | None = None) -> Self:
        """Make a sender for the run of `bus`. Raises `ConfigError` when no storage ever served that run."""
        found = await bus.get("run", RunRecord)
        if found is None:
            raise ConfigError(
                f"there is no run {bus.topology.run!r} on this bus: name another with --run, or start its "
                "`launch storage`"
            )
        return cls(bus, json.loads(found[0].config_json)["replay"]["shards"], source=source, account=account)

    async def give(self, trajectory_id: str, reward: float) -> None:
        """Give a reward; return when the bus has it. A second reward for the trajectory changes nothing.

        Raises `SchemaError` for a name of no trajectory and for a reward that is no finite number, and
        `BusError` when the bus does not take it."""
        given = RewardGiven(trajectory_id=trajectory_id, reward=float(reward), source=self._source)
        given.check()
        if self._account is not None:
            copy = Copy(given.lease_id, given.sample, bytes(16), given.reward)
            self._account.add([AccountRecord(Kind.GIVEN, copy)])
        await self._publisher.publish(
            self._bus.subject("outcomes", "rewards", shard_of(given.lease_id, self._shards)),
            encode(given),
            message_id=f"reward-{trajectory_id}-{given.reward!r}",  # another reward is no duplicate
        )


async def give_reward(bus: Bus, trajectory_id: str, reward: float, *, source: str = "") -> None:
    """Give one reward; raises as `RewardSender`, which is quicker for many."""
    sender = await RewardSender.to_run(bus, source=source)
    await sender.give(trajectory_id, reward)


@dataclass
class Tally:
    """Account of the lines of a file of rewards."""

    taken: int = 0
    """Number of rewards that the bus has; shards join them to trajectories later."""
    refused: list[str] = field(default_factory=list)
    """Place and reason of each line that gives no reward."""


async def give_lines(
    sender: RewardSender, chunks: AsyncIterable[Sequence[str | bytes]], tally: Tally
) -> None:
    """Give the reward of each line like {"trajectory_id": "g00000012.3", "reward": 0.5}, counting in `tally`.

    A line that cannot be used stops none of the others. The lines of a chunk travel together. Raises
    `BusError` when the bus fails; giving the same lines again is then harmless."""
    numbers = count(1)
    async for lines in chunks:
        numbered = [(next(numbers), line) for line in lines]
        work = (_give_line(sender, number, line) for number, line in numbered if line.strip())
        for refusal in await together(work):
            if refusal is None:
                tally.taken += 1
            else:
                tally.refused.append(refusal)


async def _give_line(sender: RewardSender, number: int, line: str | bytes) -> str | None:
    try:
        row = json.loads(line)
        trajectory_id, reward = row["trajectory_id"], row["reward"]
    except (ValueError, RecursionError) as error:
        return f"line {number}: not JSON ({error}): write one like {_EXAMPLE}"
    except (KeyError, TypeError):
        return f"line {number}: {_shown(line)} has no trajectory_id or no reward: write one like {_EXAMPLE}"
    if not isinstance(trajectory_id, str) or isinstance(reward, bool) or not isinstance(reward, int | float):
        return f"line {number}: {_shown(line)} is no text and a number: write one like {_EXAMPLE}"
    try:
        await sender.give(trajectory_id, reward)
    except (SchemaError, OverflowError) as error:
        return f"line {number}: {error}"
    return None


def _shown(line: str | bytes) -> str:
    return repr(line.strip()[:100])
