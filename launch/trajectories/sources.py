"""Where the trajectories of a run are read from: the stores in its directory, or its shards over the bus."""

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol

from bus.connection import Bus
from bus.errors import ConfigError, UnreadableGroupsError
from bus.messages import PolicyManifest, RunRecord
from bus.requests import NOTHING_AFTER, ReadRequest, StoredGroups, StoredRequest
from bus.topology import shard_of
from bus.trajectory import Trajectory, TrajectoryBatch
from bus.waiting import told_if_slow
from launch.model_files.model_directory import model_of_run
from launch.run_view.run_files import RunFiles, recorded_config
from launch.settings.run_config import RunConfig, validate
from launch.trajectories.stored_groups import GroupReader, stored_groups
from launch.trajectories.token_texts import Decode, decoder, has_tokenizer
from launch.trajectories.training import GroupTraining, ended_state, training_of
from learner.metrics import trained_logprobs
from storage.disk.run_directory import RunDirectory
from storage.ledger.ledger_reader import leases_of_step

CONNECT_S = 1.5
STATE_S = 1.0
"""Seconds for which the state of a run is taken to stay as it is."""
ANSWER_TIMEOUT_S = 10.0
NEWEST = 2048
"""Groups of each shard that are asked for over the bus: the latest complete ones."""


class Groups(Protocol):
    """Reads the complete groups of a run, for the time of one request."""

    @property
    def left_out(self) -> Mapping[int, str]:
        """Return why groups that were to be read could not be, by lease."""

    async def leases(self) -> list[int]:
        """Return the leases of complete groups, ascending."""

    async def read(self, leases: Sequence[int]) -> list[list[Trajectory]]:
        """Return the groups that can be read of these."""


class TrajectorySource(Protocol):
    """Tells of the trajectories of a run; nothing is taken from it."""

    def groups(self) -> AbstractAsyncContextManager[Groups]:
        """Open what reads the groups: once for each request, since that takes longer than to read a few."""

    async def of_step(self, step: int) -> list[int]:
        """Return the leases that a step trained on. Raises `ConfigError` where that is not known."""

    async def training(self, leases: Iterable[int]) -> dict[int, GroupTraining]:
        """Return what the learner made of these groups; nothing is known of them over the bus."""

    async def recorded(self) -> set[str]:
        """Return trajectories whose trained log-probs are recorded. Raises `ConfigError` if nobody knows."""

    async def decode(self) -> Decode:
        """Return what turns token ids into text."""

    async def newest_version(self) -> int:
        """Return the newest version of the policy that is known, 0 before the first."""

    async def is_over(self) -> bool:
        """Return whether no more trajectories will come."""


class StoredTrajectories:
    """Reads the stores of a run whose directory is here; a storage that writes them may go on."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._decode: Decode | None = None
        self._state, self._looked_s = "", -STATE_S

    @asynccontextmanager
    async def groups(self) -> AsyncIterator[Groups]:
        with ExitStack() as stack:
            yield _StoredGroups(await asyncio.to_thread(stack.enter_context, stored_groups(self._run)))

    async def of_step(self, step: int) -> list[int]:
        return await asyncio.to_thread(leases_of_step, self._run.ledger, step)

    async def training(self, leases: Iterable[int]) -> dict[int, GroupTraining]:
        return await asyncio.to_thread(training_of, self._run, leases, await self._ended())

    async def _ended(self) -> str:
        """Return the state of a run that is over, which takes a look at all processes of this host."""
        if time.monotonic() > self._looked_s + STATE_S:
            self._state, self._looked_s = await asyncio.to_thread(ended_state, self._run), time.monotonic()
        return self._state

    async def recorded(self) -> set[str]:
        """Return trajectories whose trained log-probs are recorded; none with the learner on another host."""
        return await asyncio.to_thread(trained_logprobs.trajectories, self._run.path)

    async def decode(self) -> Decode:
        return await asyncio.to_thread(self._decoder) if self._decode is None else self._decode

    async def newest_version(self) -> int:
        latest = await asyncio.to_thread(lambda: RunFiles(self._run.path, lenient=True).latest_step)
        return 0 if latest is None else latest.policy_version

    async def is_over(self) -> bool:
        """Return whether no process of the run goes on, here or on a host that is not seen."""
        return bool(await self._ended())

    def _decoder(self) -> Decode:
        model = model_of_run(recorded_config(self._run), self._run)
        found = decoder(model)
        if has_tokenizer(model):  # the tokenizer may come only after the run was looked at
            self._decode = found
        return found


class _StoredGroups:
    """Reads stores in threads, since that waits for the disk."""

    def __init__(self, groups: GroupReader) -> None:
        self._groups = groups
        self._is_fresh = True

    @property
    def left_out(self) -> Mapping[int, str]:
        return self._groups.left_out

    async def leases(self) -> list[int]:
        return await asyncio.to_thread(self._leases)

    def _leases(self) -> list[int]:
        if not self._is_fresh:
            self._groups.open()
        self._is_fresh = False
        return self._groups.complete()

    async def read(self, leases: Sequence[int]) -> list[list[Trajectory]]:
        return await asyncio.to_thread(self._groups.read, leases)


class BusTrajectories:
    """Asks the shards of a live run on other hosts."""

    def __init__(self, locate: Callable[[], RunConfig], *, connect_s: float = CONNECT_S) -> None:
        """Use the bus that `locate` names each time, since that of a run may move; connect within
        `connect_s`."""
        self._locate = locate
        self._connect_s = connect_s
        self._decode: Decode | None = None

    @asynccontextmanager
    async def groups(self) -> AsyncIterator[Groups]:
        async with self._bus() as bus:
            yield _SentGroups(bus, await _shards(bus))

    async def of_step(self, step: int) -> list[int]:
        """Raise `ConfigError`: which step trained on which group stands in the ledger alone."""
        raise ConfigError("steps are known on the host of the run's storage only: leave out the step")

    async def training(self, leases: Iterable[int]) -> dict[int, GroupTraining]:
        """Return that nothing is known of these groups: ledger and records are on other hosts."""
        return dict.fromkeys(leases, GroupTraining())

    async def recorded(self) -> set[str]:
        """Raise `ConfigError`: the learner's records are on another host."""
        raise ConfigError(
            "importance ratios are known on the host of the run's learner only: list all trajectories"
        )

    async def decode(self) -> Decode:
        """Return what turns token ids into text, by the tokenizer that the newest policy names."""
        if self._decode is None:
            from actors.weights.follow import fetch_model_files

            async with self._bus() as bus:
                found = await bus.get("policy", PolicyManifest)
                if found is None:
                    raise ConfigError(
                        f"run {bus.topology.run!r} has no policy yet: start its learner, then try again"
                    )
                with tempfile.TemporaryDirectory(prefix="sluice-tokenizer-") as directory:
                    await fetch_model_files(bus, found[0].model, Path(directory))
                    decode = await asyncio.to_thread(decoder, Path(directory))
                    if not has_tokenizer(Path(directory)):
                        return decode  # a later policy may name one
            self._decode = decode
        return self._decode

    async def newest_version(self) -> int:
        async with self._bus() as bus:
            found = await bus.get("policy", PolicyManifest)
        return 0 if found is None else found[0].policy_version

    async def is_over(self) -> bool:
        """Return False: the bus does not say it."""
        return False

    @asynccontextmanager
    async def _bus(self) -> AsyncIterator[Bus]:
        where = self._locate()
        limits = {"connect_timeout_s": self._connect_s, "patience_s": self._connect_s}
        impatient = where.bus.model_copy(update=limits)
        async with Bus.connect(impatient, where.run, name="trajectories") as bus:
            yield bus


class _SentGroups:
    """Reads groups that shards send over the bus."""

    def __init__(self, bus: Bus, shards: int) -> None:
        self.left_out: dict[int, str] = {}
        self._bus = bus
        self._shards = shards

    async def leases(self) -> list[int]:
        found = [await self._latest(shard) for shard in range(self._shards)]
        return sorted(lease for leases in found for lease in leases)

    async def _latest(self, shard: int) -> tuple[int, ...]:
        total = (await self._stored(shard, NOTHING_AFTER)).total
        return tuple((await self._stored(shard, max(0, total - NEWEST))).lease_ids)

    async def _stored(self, shard: int, after: int) -> StoredGroups:
        subject, request = self._bus.subject("rpc", "stored", shard), StoredRequest(after=after)
        with told_if_slow("waiting_for_answer", who=f"shard {shard}", longest_s=ANSWER_TIMEOUT_S):
            return await self._bus.request(subject, request, StoredGroups, timeout_s=ANSWER_TIMEOUT_S)

    async def read(self, leases: Sequence[int]) -> list[list[Trajectory]]:
        found = [await self._group(lease) for lease in leases]
        return [group for group in found if group]

    async def _group(self, lease: int) -> list[Trajectory]:
        subject = self._bus.subject("rpc", "read", shard_of(lease, self._shards))
        request, timeout_s = ReadRequest(lease_ids=(lease,)), ANSWER_TIMEOUT_S
        try:
            answers = await self._bus.request_many(subject, request, TrajectoryBatch, timeout_s=timeout_s)
        except UnreadableGroupsError as error:
            self.left_out[lease] = str(error)
            return []
        return [trajectory for batch in answers for trajectory in batch.trajectories]


async def _shards(bus: Bus) -> int:
    found = await bus.get("run", RunRecord)
    if found is None:
        raise ConfigError(f"this bus has no run {bus.topology.run!r}")
    return validate(json.loads(found[0].config_json)).replay.shards
