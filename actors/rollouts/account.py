"""What an actor writes down of the trajectories that it publishes, for `launch verify`."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from bus.streams.publish import StreamAck
from bus.trajectory import Trajectory
from storage.account.records import AccountRecord, AccountWriter, Copy, Kind


class ActorAccount:
    """Notes each trajectory before it is published, and again once the bus has acknowledged it. So a
    trajectory that is stored and was never sent is told from one whose actor died before the answer. The
    files are written on a thread: a disk that hangs holds up the publication, and not the rollouts."""

    def __init__(self, directory: Path | None, actor: str) -> None:
        """Write to files in `directory`; None is for a worker that keeps no account."""
        self._writer = None if directory is None else AccountWriter(directory, actor)

    async def sent(self, trajectories: Sequence[Trajectory]) -> list[AccountRecord]:
        """Note trajectories that are about to be published; return what was noted."""
        if self._writer is None or not trajectories:
            return []
        writer, now_s = self._writer, time.monotonic()

        def note() -> list[AccountRecord]:
            copies = map(Copy.of, trajectories)
            records = [AccountRecord(Kind.SENT, copy, since_s=now_s, written_s=now_s) for copy in copies]
            writer.add(records, run=trajectories[0].run)
            return records

        return await asyncio.to_thread(note)

    async def acknowledged(self, sent: Sequence[AccountRecord], ack: StreamAck, *, run: str) -> None:
        if self._writer is None or not sent:
            return
        now_s = time.monotonic()
        records = [
            one._replace(kind=Kind.ACKNOWLEDGED, number=ack.sequence, flag=ack.duplicate, written_s=now_s)
            for one in sent
        ]
        await asyncio.to_thread(self._writer.add, records, run=run)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
