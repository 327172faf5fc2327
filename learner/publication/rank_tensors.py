"""How ranks publish the tensors that they have: rank 0 asks, and each codes, hashes and stores its own beside
training. Rank 0 gets digests, sizes and references.

Wishes go to all ranks as calls (learner/world), in one order; answers come back through a gloo group of their
own, in that order."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from bus.errors import BusError, WorldError
from bus.messages import BlobRef
from learner.publication.announcement import AdapterBase
from learner.publication.host_copy import Copied, HostCopy
from learner.publication.kept_versions import file_content, put_kept
from learner.publication.snapshot_writer import HeldContent
from learner.publication.tensor_encoder import TensorEncoder, Tensors
from storage.disk.atomic_files import Content, Data
from storage.weights.blob_stores import BlobStore, delete_blobs
from storage.weights.deltas import EncodedTensors
from storage.weights.tensors import HostTensor, RemoteTensor, Weights, Words, snapshot_content

T = TypeVar("T")
POLL_S = 0.25
"""Seconds between two questions whether all ranks have written their snapshots."""


@dataclass(frozen=True)
class Wish:
    """A method of `OwnTensors` that rank 0 wants other ranks to call and to answer."""

    method: str
    arguments: tuple[Any, ...] = ()
    rank: int | None = None
    """Rank that answers; None for all but rank 0."""


@dataclass(frozen=True)
class Share:
    """What one rank has stored of a version."""

    encoded: EncodedTensors
    """What the rank's part of a delta holds, without the bodies."""
    blobs: tuple[BlobRef, ...]
    """Where the bodies are; none for a rank without changes."""


class StoredSnapshot(NamedTuple):
    """What ranks have stored of a snapshot, or of the frozen weights of adapters."""

    digests: Mapping[str, bytes]
    """Digest of each tensor by name; of a frozen one with what else tells it from others."""
    blobs: tuple[BlobRef, ...]


class _Raw(NamedTuple):
    """An answer that follows as bytes: packing them would take longer than sending."""

    size_bytes: int


class _Writing(NamedTuple):
    content: HeldContent
    blob: Future[BlobRef]

    @property
    def stored(self) -> set[BlobRef]:
        """Return the snapshot, if it is written."""
        is_there = self.blob.done() and not self.blob.cancelled() and self.blob.exception() is None
        return {self.blob.result()} if is_there else set()


def answer_group(timeout_s: float) -> dist.ProcessGroup | None:
    """Return a group for answers; None in a world of one. Every rank calls this at the same moment."""
    if dist.get_world_size() == 1:
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return group


class OwnTensors:
    """The tensors of a rank other than 0, and its answers; all its work is on one thread, in order."""

    def __init__(
        self, encoder: TensorEncoder, group: dist.ProcessGroup | None, bytes_per_s: int | None = None,
        base: AdapterBase | None = None,
    ) -> None:  # fmt: skip
        """`bytes_per_s` bounds how fast all ranks together write snapshots beside deltas. `base` is what
        published adapters belong to."""
        self._encoder, self._group, self._bytes_per_s, self._base_of = encoder, group, bytes_per_s, base
        self._thread = ThreadPoolExecutor(1, "published tensors")
        self._newest: Callable[[], Tensors] = dict
        """Returns the tensors of the version that is being published, in its format."""
        self._versions: dict[int, Tensors] = {}
        """The version before, which is the base of a delta, and then the newest, once it has a number."""
        self._base: Tensors = {}
        self._place: tuple[BlobStore, asyncio.AbstractEventLoop] | None = None
        self._stored: set[BlobRef] = set()
        """What rank 0 has heard of and may still announce."""
        self._writing: dict[str, _Writing] = {}
        """The latest snapshot beside deltas, and the latest version that is to stay, each until rank 0 has
        announced it or given it up."""

    @asynccontextmanager
    async def stored_in(self, store: BlobStore) -> AsyncIterator[None]:
        """Store and serve what this rank publishes inside, in the loop that runs now."""
        await store.start()
        self._place = store, asyncio.get_running_loop()
        try:
            yield
        finally:
            for each in self._writing.values():
                each.content.end()
            await store.close()

    def begin(self, copying: Future[Copied]) -> None:
        """Have the tensors of the next version, after all that was asked of those before. It is called before
        they are copied: as soon as they are, rank 0 may ask for them."""
        self._thread.submit(self._begin, copying)

    def fulfil(self, wish: Wish) -> None:
        """Answer in turn, while other work goes on."""
        if wish.rank in (None, dist.get_rank()):
            self._thread.submit(self._answer, wish)

    def _begin(self, copying: Future[Copied]) -> None:
        self._versions = dict(list(self._versions.items())[-1:])
        self._base = next(iter(self._versions.values()), {})
        found: list[Tensors] = []

        def newest() -> Tensors:
            if not found:  # what is wrong with the weights is told to who asks first
                found.append(self._encoder.in_format(copying.result().wait()))
            return found[0]

        self._newest = newest

    def _answer(self, wish: Wish) -> None:
        try:
            answer: object = getattr(self, wish.method)(*wish.arguments)
        except Exception as error:  # noqa: BLE001  # rank 0 raises it
            answer = error
        raw = answer if isinstance(answer, np.ndarray) else None
        said = answer if raw is None else _Raw(raw.nbytes)
        dist.send_object_list([said], 0, self._group, torch.device("cpu"))
        if raw is not None:
            dist.send(torch.from_numpy(raw), 0, self._group)

    # --- what rank 0 wishes ---

    def encoded(self, policy_version: int, most_bytes: int, tokens: tuple[object, ...]) -> Share | None:
        """Store what a delta has of these tensors; return None where that is more than `most_bytes`."""
        newest = self._named(policy_version)
        base = Weights(policy_version, self._base, {})
        found = self._encoder.encoded(base, newest, most_bytes=most_bytes)
        if found is None:
            return None
        blobs = (self._put(found.content, tokens),) if found.changes else ()
        return Share(replace(found, bodies={}), blobs)

    def snapshot(self, policy_version: int, tokens: tuple[object, ...]) -> StoredSnapshot:
        """Store these tensors whole."""
        newest = self._named(policy_version)
        digests = self._encoder.digests(newest)
        content = snapshot_content(Weights(policy_version, newest, digests))
        return StoredSnapshot(digests, (self._put(content, tokens),) if newest else ())

    def base(self, tokens: tuple[object, ...]) -> StoredSnapshot:
        """Store this rank's share of the frozen weights below adapters."""
        if self._base_of is None:
            raise RuntimeError(f"rank {dist.get_rank()} publishes no adapters")
        weights = self._base_of.weights()
        blobs = (self._put(snapshot_content(weights), tokens),) if weights.tensors else ()
        return StoredSnapshot(weights.described(), blobs)

    def put_files(self, files: tuple[str, ...], tokens: tuple[object, ...]) -> tuple[BlobRef, ...]:
        """Store those files whose turn it is on this rank."""
        mine = files[dist.get_rank() :: dist.get_world_size()]
        return tuple(self._put(file_content(Path(file)), tokens) for file in mine)

    def begin_snapshot(
        self, kind: str, policy_version: int, directory: str | None, tokens: tuple[object, ...]
    ) -> None:
        """Begin to store the announced version whole, beside what comes next; as a file too, where there is a
        `directory`."""
        self.end(kind)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        weights = Weights(policy_version, self._versions[policy_version], {})
        content = HeldContent(weights, self._bytes_per_s, ranks=ranks)
        place = None if directory is None else Path(directory)
        storing = self._begun(lambda store: put_kept(store, content, place, tokens, rank=rank, ranks=ranks))
        self._writing[kind] = _Writing(content, storing)

    def written(self, kind: str) -> BlobRef | None:
        """Return the snapshot of this kind that was begun last; None while it is being written."""
        writing = self._writing.get(kind)
        if writing is None or not writing.blob.done():
            return None
        writing.content.end()
        return writing.blob.result()

    def end(self, kind: str) -> None:
        """Write no more of the snapshot begun last; `retire` removes it where it is not needed."""
        if writing := self._writing.pop(kind, None):
            writing.content.end()
            wait([writing.blob])
            self._stored |= writing.stored

    def held(self, blobs: Iterable[BlobRef]) -> set[BlobRef]:
        """Return which of these blobs this rank stored, if all of those are still there."""
        mine = self._stored.intersection(blobs)
        return mine if self._begun(lambda store: store.holds(mine)).result() else set()

    def retire(self, needed: set[BlobRef]) -> None:
        """Remove all that this rank stored but what is needed; a snapshot that is being written stays."""
        old = self._stored - needed
        self._stored -= self._begun(lambda store: delete_blobs(store, old)).result()

    def read(self, policy_version: int, name: str, start: int, stop: int) -> Words:
        """Return bytes of a tensor."""
        if policy_version not in self._versions:
            raise BusError(f"version {policy_version} is not on rank {dist.get_rank()} any more")
        return self._versions[policy_version][name].words.view(np.uint8)[start:stop]

    def _named(self, policy_version: int) -> Tensors:
        """Return the newest tensors, which have this version. The memory of a snapshot of the one before is
        soon wanted back."""
        newest = self._newest()
        for each in self._writing.values():
            each.content.release(self._encoder.threads)
        self._versions.pop(policy_version, None)  # the version may be announced once more
        self._versions[policy_version] = newest
        return newest

    def _put(self, content: Content, tokens: tuple[object, ...]) -> BlobRef:
        blob = self._begun(lambda store: store.put(content, *tokens)).result()
        self._stored.add(blob)
        return blob

    def _begun(self, work: Callable[[BlobStore], Coroutine[Any, Any, T]]) -> Future[T]:
        """Begin to work with the store, in its loop."""
        if self._place is None:
            raise RuntimeError(f"rank {dist.get_rank()} has no store for what it publishes")
        store, loop = self._place
        return asyncio.run_coroutine_threadsafe(work(store), loop)


class OtherRanks:
    """Rank 0's view of the tensors that other ranks have, of which there may be none."""

    def __init__(
        self, host: HostCopy, group: dist.ProcessGroup | None, send: Callable[[Wish], Awaitable[None]]
    ) -> None:
        """`send` has every rank `fulfil` a wish, in the loop that runs now."""
        self._host, self._group, self._send = host, group, send
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, "answers of ranks")
        self._one = asyncio.Lock()
        self._asking: set[asyncio.Task[Any]] = set()

    @property
    def ranks(self) -> int:
        """Return how many ranks have tensors of a version, this one among them."""
        return 1 if self._host.divided is None else dist.get_world_size()

    def shapes(self, mine: Tensors) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of all tensors before they are quantised; rank 0 has `mine`."""
        if self._host.divided is not None:
            return self._host.divided.shapes
        return {name: tensor.shape for name, tensor in mine.items()}

    def with_theirs(self, mine: Tensors, encoder: TensorEncoder, policy_version: int) -> Tensors:
        """Return all tensors of a version as they are published, of which rank 0 has `mine`."""
        divided = self._host.divided
        if divided is None:
            return mine
        found: dict[str, HostTensor] = {}
        for name, kind in divided.kinds.items():
            for each, (dtype, shape) in encoder.kinds({name: kind}).items():
                read = partial(self._read, divided.holders[name], policy_version, each)
                found[each] = mine.get(each) or RemoteTensor(dtype, shape, read)
        return found

    async def encoded(
        self, policy_version: int, most_bytes: int, tokens: tuple[object, ...]
    ) -> list[Share | None]:
        """Have each other rank store what a delta has of its tensors; return None of one with more than
        `most_bytes`."""
        wish = Wish("encoded", (policy_version, most_bytes, tokens))
        return cast(list[Share | None], await self._ask(wish))

    async def snapshot(self, policy_version: int, tokens: tuple[object, ...]) -> StoredSnapshot:
        """Have each other rank store its tensors whole."""
        return await self._stored(Wish("snapshot", (policy_version, tokens)))

    async def base(self, tokens: tuple[object, ...]) -> StoredSnapshot:
        """Have each other rank store its share of the frozen weights below adapters."""
        return await self._stored(Wish("base", (tokens,)))

    async def _stored(self, wish: Wish) -> StoredSnapshot:
        found = cast(list[StoredSnapshot], await self._ask(wish))
        digests = {name: digest for each in found for name, digest in each.digests.items()}
        return StoredSnapshot(digests, tuple(blob for each in found for blob in each.blobs))

    async def put_files(self, files: Sequence[Path], tokens: tuple[object, ...]) -> tuple[BlobRef, ...]:
        """Have each rank store every so many-th of the files, of which rank 0 stores the first."""
        found = await self._ask(Wish("put_files", (tuple(map(str, files)), tokens)))
        return tuple(blob for each in cast(list[tuple[BlobRef, ...]], found) for blob in each)

    async def begin_snapshot(
        self, kind: str, policy_version: int, tokens: tuple[object, ...], directory: Path | None = None
    ) -> None:
        """Have each rank begin to store its tensors of the announced version whole; as a file too, where
        there is a `directory`."""
        place = None if directory is None else str(directory)
        await self._ask(Wish("begin_snapshot", (kind, policy_version, place, tokens)))

    async def end(self, kind: str) -> None:
        """Have each rank end the snapshot begun last, which is announced by now, or is given up."""
        await self._ask(Wish("end", (kind,)))

    async def written(self, kind: str) -> tuple[BlobRef, ...]:
        """Return the snapshots begun last when all are written. Raises what ended one of them."""
        while True:
            found = cast(list[BlobRef | None], await self._ask(Wish("written", (kind,))))
            blobs = tuple(blob for blob in found if blob is not None)
            if len(blobs) == len(found):
                return blobs
            await asyncio.sleep(POLL_S)

    async def hold_all(self, blobs: set[BlobRef]) -> bool:
        """Tell whether other ranks have all these blobs."""
        found = cast(list[set[BlobRef]], await self._ask(Wish("held", (blobs,)))) if blobs else []
        return blobs == set().union(*found)

    async def retire(self, needed: set[BlobRef]) -> None:
        """Have the ranks remove what is not needed any more."""
        await self._ask(Wish("retire", (needed,)))

    def _read(self, rank: int, policy_version: int, name: str, start: int, stop: int) -> Data:
        """Fetch some bytes of a tensor; on any thread but that of the loop."""
        if start == stop:
            return b""
        asked = self._ask(Wish("read", (policy_version, name, start, stop), rank))
        [found] = asyncio.run_coroutine_threadsafe(asked, self._loop).result()
        return cast(memoryview, found)

    async def _ask(self, wish: Wish) -> list[object]:
        if self._host.divided is None:
            return []
        asking = asyncio.create_task(self._asked(wish), name=f"ask for {wish.method}")
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        return await asyncio.shield(asking)  # an answer that nobody took would be taken for the next

    async def _asked(self, wish: Wish) -> list[object]:
        ranks = range(1, dist.get_world_size()) if wish.rank is None else (wish.rank,)
        async with self._one:
            await self._send(wish)
            answers = await asyncio.get_running_loop().run_in_executor(self._thread, self._received, ranks)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def _received(self, ranks: Iterable[int]) -> list[object]:
        answers: list[object] = []
        for rank in ranks:
            box: list[object] = [None]
            try:
                dist.recv_object_list(box, rank, self._group, torch.device("cpu"))
                if isinstance(box[0], _Raw):
                    some = torch.empty(box[0].size_bytes, dtype=torch.uint8)
                    dist.recv(some, rank, self._group)
                    box = [some.numpy().data]
            except RuntimeError as error:
                raise WorldError(f"rank {rank} of the learner did not send its weights: {error}") from error
            answers += box
        return answers
