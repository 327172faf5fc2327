"""Reads the answers to held-out prompts that storage keeps, as trajectories that nothing trains on."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from bus.errors import ConfigError
from bus.evaluation_messages import HeldOutAnswers
from bus.messages import parse_trajectory_name
from bus.trajectory import Parent, Trajectory
from launch.trajectories.search import AT_ONCE, DATA_SET
from launch.trajectories.sources import Groups, StoredTrajectories
from launch.trajectories.training import Evaluation, GroupTraining
from storage.disk.run_directory import RunDirectory
from storage.metrics.held_out_answers import HeldOutStore
from storage.settings.evaluation import HELD_OUT

PREFIX = "h"
"""Begins the names of these trajectories, where those of others begin with g."""
NOT_TRAINED = "answers to held-out prompts are not trained: leave out steps and importance ratios"


def group_of(name: str) -> tuple[int, bool]:
    """Return the number of the group of a trajectory's name, and whether it answers a held-out prompt. Raises
    `SchemaError` for what is no such name."""
    is_held_out = name.startswith(PREFIX)
    return parse_trajectory_name(f"g{name[1:]}" if is_held_out else name)[0], is_held_out


class HeldOutTrajectories(StoredTrajectories):
    """Reads the answers to held-out prompts of a run whose directory is here. The answers to one prompt by
    one version are a group, whose number stands in the place of a lease."""

    def __init__(self, run: RunDirectory) -> None:
        super().__init__(run)
        self._store = HeldOutStore(run.held_out_answers)
        self._training: dict[int, GroupTraining] = {}
        """What groups that were read are answers of: storage may have removed them since."""

    @asynccontextmanager
    async def groups(self) -> AsyncIterator[Groups]:
        """Return what reads the groups. Raises `ConfigError` where storage's directory is elsewhere."""
        if not self._run.exists:
            raise ConfigError("answers to held-out prompts are kept on the host of the run's storage only")
        yield _HeldOutGroups(self._store, self._training)

    async def of_step(self, step: int) -> list[int]:
        """Raise `ConfigError`: no step trains on held-out answers."""
        raise ConfigError(NOT_TRAINED)

    async def recorded(self) -> set[str]:
        """Raise `ConfigError`: the learner never sees them."""
        raise ConfigError(NOT_TRAINED)

    async def training(self, leases: Iterable[int]) -> dict[int, GroupTraining]:
        """Return what these groups are answers of, as far as they are kept, or were when they were read."""
        wanted, known = [*leases], self._training
        unread = [number for number in wanted if number not in known]
        async with self.groups() as groups:
            for first in range(0, len(unread), AT_ONCE):
                await groups.read(unread[first : first + AT_ONCE])
        return {number: known[number] for number in wanted if number in known}


class _HeldOutGroups:
    def __init__(self, store: HeldOutStore, training: dict[int, GroupTraining]) -> None:
        self.left_out: dict[int, str] = {}
        self._store = store
        self._training = training

    async def leases(self) -> list[int]:
        return await asyncio.to_thread(self._store.numbers)

    async def read(self, leases: Sequence[int]) -> list[list[Trajectory]]:
        found = await asyncio.to_thread(self._store.read, leases)
        gone = {*leases}.difference(found)
        self.left_out.update(dict.fromkeys(sorted(gone), "storage has removed its answers meanwhile"))
        self._training.update({number: _training(one) for number, one in found.items()})
        return [named_answers(number, one) for number, one in found.items()]


def _training(one: HeldOutAnswers) -> GroupTraining:
    return GroupTraining(label=one.label, evaluation=Evaluation(one.policy_version, one.data_set or HELD_OUT))


def named_answers(number: int, one: HeldOutAnswers) -> list[Trajectory]:
    """Return the answers to a prompt under names of their own, by the number of their group."""
    return [_named(t, number, one) for t in one.batch.whole]


def _named(t: Trajectory, number: int, one: HeldOutAnswers) -> Trajectory:
    """Return an answer under a name of its own: in its message the place of its prompt is that of a lease."""
    group = f"{PREFIX}{number:08}"
    parent = t.parent and Parent(f"{group}.{t.parent.trajectory_id.rpartition('.')[2]}", t.parent.token)
    return replace(
        t, trajectory_id=f"{group}.{t.sample}", group_id=group, lease_id=number, parent=parent,
        metadata={**t.metadata, DATA_SET: one.data_set or HELD_OUT},
    )  # fmt: skip
