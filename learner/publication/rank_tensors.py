"""How rank 0 publishes tensors that other ranks have: it asks, and they code, hash and send, beside training.

Wishes go to all ranks as calls (learner/world), in one order; answers come back through a gloo group of their
own, in that order."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist

from bus.errors import BusError, WorldError
from learner.publication.host_copy import Copied, HostCopy
from learner.publication.tensor_encoder import TensorEncoder, Tensors
from storage.disk.atomic_files import Data
from storage.weights.deltas import EncodedTensors
from storage.weights.tensors import HostTensor, RemoteTensor, Weights, Words


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What rank 0 wants of other ranks' tensors of a version."""

    kind: Literal["encoded", "digests", "bytes", "hold", "drop"]
    """`hold` keeps a copy of the version until `drop`."""
    policy_version: int
    rank: int | None = None
    """Rank that answers; None for all but rank 0."""
    most_bytes: int = sys.maxsize
    """Bytes above which nothing is to be encoded."""
    name: str = ""
    """Tensor whose bytes from `start` to `stop` are wanted."""
    start: int = 0
    stop: int = 0


def answer_group(timeout_s: float) -> dist.ProcessGroup | None:
    """Return a group for answers; None in a world of one. Every rank calls this at the same moment."""
    if dist.get_world_size() == 1:
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return group


class OwnTensors:
    """The tensors of a rank other than 0, and its answers; all its work is on one thread, in order."""

    def __init__(self, encoder: TensorEncoder, group: dist.ProcessGroup | None) -> None:
        self._encoder, self._group = encoder, group
        self._thread = ThreadPoolExecutor(1, "published tensors")
        self._newest: Callable[[], Tensors] = dict
        """Returns the tensors of the version that is being published, in its format."""
        self._versions: dict[int, Tensors] = {}
        """The version before, which is the base of a delta, and then the newest, once it has a number."""
        self._base: Tensors = {}
        self._held: dict[int, tuple[int, Tensors]] = {}
        """Copies of versions, and by how many each is held."""

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
        some: Words | None = None
        try:
            answer: object = self._found(wish)
            some = self._bytes(wish) if wish.kind == "bytes" else None
        except Exception as error:  # noqa: BLE001  # rank 0 raises it
            answer = error
        dist.send_object_list([answer], 0, self._group, torch.device("cpu"))
        if some is not None:  # as they lie: packing them would take longer than sending
            dist.send(torch.from_numpy(some), 0, self._group)

    def _found(self, wish: Wish) -> EncodedTensors | Mapping[str, bytes] | None:
        if wish.kind in ("hold", "drop"):
            self._hold(wish.policy_version, 1 if wish.kind == "hold" else -1)
        if wish.kind in ("hold", "drop", "bytes"):
            return None
        newest = self._newest()
        self._versions.pop(wish.policy_version, None)  # it is announced once more
        self._versions[wish.policy_version] = newest
        if wish.kind == "digests":
            return self._encoder.digests(newest)
        base = Weights(wish.policy_version, self._base, {})
        return self._encoder.encoded(base, newest, most_bytes=wish.most_bytes)

    def _hold(self, version: int, more: int) -> None:
        holders, tensors = self._held.pop(version, (0, None))
        if holders + more > 0:
            self._held[version] = holders + more, tensors or _copies(self._versions[version])

    def _bytes(self, wish: Wish) -> Words:
        held = self._held.get(wish.policy_version)
        tensors = self._versions.get(wish.policy_version) if held is None else held[1]
        if tensors is None:
            raise BusError(f"version {wish.policy_version} is not on rank {dist.get_rank()} any more")
        return tensors[wish.name].words.view(np.uint8)[wish.start : wish.stop]


def _copies(tensors: Tensors) -> Tensors:
    return {name: replace(tensor, words=tensor.words.copy()) for name, tensor in tensors.items()}


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
                wish = Wish(
                    kind="bytes", policy_version=policy_version, rank=divided.holders[name], name=each
                )
                found[each] = mine.get(each) or RemoteTensor(dtype, shape, partial(self._read, wish))
        return found

    async def encoded(self, policy_version: int, most_bytes: int) -> list[EncodedTensors | None]:
        """Return what a delta has of each other rank's tensors; None of one with more than `most_bytes`."""
        wish = Wish(kind="encoded", policy_version=policy_version, most_bytes=most_bytes)
        return cast(list[EncodedTensors | None], await self._ask(wish))

    async def digests(self, policy_version: int) -> dict[str, bytes]:
        """Return the digests of their tensors."""
        answers = await self._ask(Wish(kind="digests", policy_version=policy_version))
        return {name: digest for some in answers for name, digest in cast(Mapping[str, bytes], some).items()}

    async def hold(self, policy_version: int) -> None:
        """Have them keep their tensors of the announced version, in memory of its own, until `drop`."""
        await self._ask(Wish(kind="hold", policy_version=policy_version))

    async def drop(self, policy_version: int) -> None:
        """Undo a `hold`."""
        await self._ask(Wish(kind="drop", policy_version=policy_version))

    def _read(self, wish: Wish, start: int, stop: int) -> Data:
        """Fetch some bytes of a tensor; on any thread but that of the loop."""
        if start == stop:
            return b""
        asked = self._ask(replace(wish, start=start, stop=stop))
        [found] = asyncio.run_coroutine_threadsafe(asked, self._loop).result()
        return cast(memoryview, found)

    async def _ask(self, wish: Wish) -> list[object]:
        if self._host.divided is None:
            return []
        asking = asyncio.create_task(self._asked(wish), name=f"ask for {wish.kind}")
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        return await asyncio.shield(asking)  # an answer that nobody took would be taken for the next

    async def _asked(self, wish: Wish) -> list[object]:
        ranks = range(1, dist.get_world_size()) if wish.rank is None else (wish.rank,)
        async with self._one:
            await self._send(wish)
            received = partial(self._received, ranks, wish.stop - wish.start)
            answers = await asyncio.get_running_loop().run_in_executor(self._thread, received)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def _received(self, ranks: Iterable[int], size_bytes: int) -> list[object]:
        answers: list[object] = []
        for rank in ranks:
            box: list[object] = [None]
            try:
                dist.recv_object_list(box, rank, self._group, torch.device("cpu"))
                if size_bytes and not isinstance(box[0], Exception):
                    some = torch.empty(size_bytes, dtype=torch.uint8)
                    dist.recv(some, rank, self._group)
                    box = [some.numpy().data]
            except RuntimeError as error:
                raise WorldError(f"rank {rank} of the learner did not send its weights: {error}") from error
            answers += box
        return answers
