"""Publishes policy versions in the background, while training goes on: deltas, and beside them now and then a
snapshot."""

import asyncio
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

import structlog

from bus.codec import Json, encode
from bus.connection import Bus
from bus.errors import BusError, FencedError, StorageError
from bus.messages import (
    AdaptedBase,
    BlobRef,
    DeltaRef,
    ModelFiles,
    PolicyManifest,
    Probe,
    RoleHolder,
    SnapshotWanted,
)
from bus.streams.blob_store import put_only_blob
from bus.streams.publish import Publisher
from bus.waiting import set_within
from learner.config.publication import PublicationConfig
from learner.publication.announcement import AdapterBase, Announcement, blobs_of
from learner.publication.kept_versions import KeptVersions, file_content, put_kept
from learner.publication.lent_weights import lent_among
from learner.publication.rank_tensors import OtherRanks
from learner.publication.snapshot_writer import SnapshotWriter
from learner.publication.tensor_encoder import TensorEncoder, Tensors
from storage.disk.atomic_files import Content
from storage.model_files.packed_files import bundle, with_config, with_dtype, with_quantisation
from storage.weights.blob_stores import BlobStore, delete_blobs, on_bus
from storage.weights.deltas import Delta, joined_delta
from storage.weights.quantisation import quantisation_config
from storage.weights.tensors import Weights, joined_digest, own, snapshot_content

log = structlog.get_logger()
SNAPSHOT_PAUSE_S = 5.0
"""Seconds between two snapshots that somebody asked for."""
SAME_SNAPSHOT_PAUSE_S = 60.0
"""Seconds between two of the same version, all of whose bytes are there."""
MOST_PINNED = 4
"""Versions that are kept for evaluations which nobody has answered yet."""
KEPT_S = 60.0
"""Seconds for which a version that is to stay is waited for, and more for a large one."""
KEPT_COPIES = 3
"""Snapshots that may be written until then: one before it, its file, and what actors fetch."""
SLOWEST_BYTES_PER_S = 20_000_000
"""Bandwidth below which a disk is taken for one that hangs."""
POLL_S = 0.25
"""Time until a wish for a snapshot is seen."""
LOOK_S = 1.0
"""Seconds between two looks whether the latest version is still announced."""
SNAPSHOT, KEPT = "snapshot", "kept"
"""Kinds of what is written beside deltas: versions for late joiners, and those that are to stay."""
NO_KERNELS: Mapping[str, str] = MappingProxyType({})
WORTH_IT = 0.5
"""A delta of more than this part of all weights is not sent: whole they travel once, for late joiners too."""
WHOLE_AFTERWARDS = 10
"""Versions behind such a delta that are published whole without making theirs: updates that move nearly all
bits of float32 do so each time, and a delta takes longer than all else in a publication."""


class WeightPublisher:
    """Announces versions, each after its bytes, and frees those that nobody needs any more.

    One publication at a time. A learner begins with a snapshot: what the one before it published is not its
    past."""

    def __init__(  # noqa: PLR0913 - one publication at a time has all of these
        self, bus: Bus, store: BlobStore, config: PublicationConfig, *,
        incarnation: str, kept: Path | None = None, base: AdapterBase | None = None,
        others: OtherRanks | None = None,
        kernels: Mapping[str, str] = NO_KERNELS, pause_reason: Callable[[], str] = str,
    ) -> None:  # fmt: skip
        """Publish to `store`; `kept` is a directory for the versions that stay. `others` are the ranks that
        have some of the tensors.

        With `base`, what is published are adapters, and the weights that they belong to are stored once.
        `kernels` are the versions of packages that engines must have too, by name. `pause_reason` says why
        admission is to be paused, if it is."""
        self.latest: PolicyManifest | None = None
        self.figures: dict[str, Json] = {}
        """Figures of the latest publication, for metrics."""
        self.alarm = ""
        """What is wrong with the latest publication, for every screen."""
        self._why_unchanged = ""
        """What is known of why a publication changed no weight."""
        self._bus = bus
        self._store = store
        self._config = config
        self._encoder = TensorEncoder(config)
        self._others = others
        self._publisher = Publisher(bus)
        self._incarnation = incarnation
        self._kernels = dict(kernels)
        self._pause_reason = pause_reason
        self._files: ModelFiles | None = None
        self._model: BlobRef | None = None
        self._weights: Weights | None = None
        """The weights announced last, which are the base of the next delta."""
        self._whole_before = 0
        """Version up to which, itself not included, no delta is made."""
        self._held: OrderedDict[int, PolicyManifest] = OrderedDict()
        self._snapshots = SnapshotWriter(config.snapshot_bytes_per_s, self._encoder.threads)
        self._keeping: set[int] = set()
        """Versions that are to stay and are not written yet."""
        self._kept = KeptVersions(config.keep_versions, kept, adapters=base is not None)
        self._base = base
        self._adapted: AdaptedBase | None = None
        """Where the base lies, once it is stored."""
        self._stored: set[BlobRef] = set()
        self._pinned: set[int] = set()
        self._revision = 0
        """Revision of the key `policy` that we set or found last."""
        self._one = asyncio.Lock()
        self._wanted: SnapshotWanted | None = None
        self._answer_given = -1, 0.0
        """The version that a snapshot was stored of on demand, and until when not again."""
        self._base_again_s = 0.0
        """Until when the base, all of whose bytes are there, is not stored again on demand."""

    def announced(self) -> Weights | None:
        """Return the weights announced last; their tensors stay as they are until others are announced. None
        where training has changed them since. Any thread may call this."""
        weights = self._weights
        return weights if weights is not None and _in_own_memory(weights) else None

    async def start(
        self, model: Path, *, dtype: str | None = None, config: Mapping[str, Json] | None = None
    ) -> None:
        """Take over from the learner before, store config and tokenizer, and listen for who lacks weights.

        `config` is the config.json of the weights, where it is not that of `model`. `dtype` is the name of
        the published weights' dtype, in which servers then compute; `None` leaves what the config of `model`
        says."""
        await self._store.start()
        found = await self._bus.get("policy", PolicyManifest)
        self._revision = found[1] if found else 0
        self._files = await asyncio.to_thread(bundle, model)
        if config is not None:
            self._files = with_config(self._files, config)
        if self._encoder.format is None:  # else the first weights say what engines are told
            self._files = self._files if dtype is None else with_dtype(self._files, dtype)
            await self._put_model()
        await self._bus.listen(self._bus.subject("notice", "snapshot"), SnapshotWanted, self._on_wanted)

    async def publish(
        self, tensors: Tensors, *, policy_version: int, stage: str, trains_from: int,
        probe: Probe | None = None, is_trained: bool = True, ess_fraction: float | None = None,
        why_unchanged: str = "",
    ) -> PolicyManifest:  # fmt: skip
        """Store what is new, then announce the version; the announcement never precedes the bytes.

        A version that `is_trained` differs from the one before it, or there is an alarm, which says
        `why_unchanged`. `tensors` must stay as they are until the publication after this one is done. The
        same version again announces its new stage; its weights must be the same. A snapshot is written
        beside, and announced with the version that is the latest when it is whole."""
        if self._kept.lack(policy_version):
            await self.kept_written()  # each takes the memory of all weights until it is written
        async with self._one:
            began = time.perf_counter()
            lent = lent_among(tensors)
            tensors = await self._in_format(tensors, policy_version)
            self._why_unchanged = why_unchanged
            announcement = Announcement(policy_version, stage, trains_from, probe, is_trained, ess_fraction)
            manifest = await self._as_delta(tensors, announcement) if await self._mended() else None
            if manifest is None:
                manifest = await self._as_snapshot(tensors, announcement)
            self.figures["time/publish_s"] = time.perf_counter() - began
            log.debug("weights_published", policy_version=policy_version, **self.figures)
            await self._snapshots.release()
            if policy_version - manifest.snapshot_at >= self._config.snapshot_every:
                await self._begin_snapshot()
            if self._kept.lack(policy_version):
                await self._begin_kept()
            await self._retire()
            if lent is not None:
                if not self._is_whole(policy_version + 1):
                    await asyncio.to_thread(lent.keep)  # the next delta is made from them
                lent.end_reading()
            return manifest

    async def snapshots_written(self) -> None:
        """Wait until the snapshots that have begun are announced. Raises what ended one of them."""
        await self._snapshots.finished()

    async def kept_written(self) -> None:
        """Wait until no version that is to stay is being written: a checkpoint behind it could not make it
        again. Raises `StorageError` where the disk takes as good as nothing."""
        if not self._keeping:
            return
        slowest = min(SLOWEST_BYTES_PER_S, self._config.snapshot_bytes_per_s or SLOWEST_BYTES_PER_S)
        limit_s = KEPT_S + KEPT_COPIES * self._announced_weights().size_bytes / slowest
        try:
            async with asyncio.timeout(limit_s):
                await self.snapshots_written()
        except TimeoutError as error:
            raise StorageError(
                f"versions {sorted(self._keeping)} (learner.publication.keep_versions) are not written after "
                f"{limit_s:.0f} s: look whether the disk of the run's directory still takes anything"
            ) from error

    async def serve(self, stop: asyncio.Event) -> None:
        """Publish a snapshot, until `stop`, when somebody cannot get the announced weights without one."""
        while not stop.is_set():
            wanted, self._wanted = self._wanted, None
            if wanted is not None and self.latest is not None:
                try:
                    await self._answer(wanted)
                except BusError as error:  # whoever wants the snapshot asks again
                    log.warning("snapshot_not_published", reason=str(error))
                self._wanted = None
                await set_within(stop, SNAPSHOT_PAUSE_S)
            await set_within(stop, POLL_S)

    async def keep_announced(self, stop: asyncio.Event) -> None:
        """Announce the latest version again, until `stop`, when the bus has lost it or somebody who is no
        learner has overwritten it."""
        while not await set_within(stop, LOOK_S):
            manifest = self.latest
            try:
                if manifest is None or await self._bus.get("policy", PolicyManifest) is not None:
                    continue
                if await self._bus.swap("policy", manifest, 0) is not None:
                    log.warning("policy_announced_again", policy_version=manifest.policy_version)
            except BusError as error:  # the key is looked at again
                log.warning("policy_not_kept", reason=str(error))

    async def _answer(self, wanted: SnapshotWanted) -> None:
        async with self._one:
            manifest = self.latest
            base_again = wanted.lacks_base and self._forget_damaged_base()
            if manifest is None or (0 <= wanted.policy_version < manifest.snapshot_at and not base_again):
                return  # there is a snapshot that they have not tried
            intact = await self._mended()
            if intact and not wanted.incarnation:  # only the key was lost
                await self._set_policy(manifest)
            elif not intact or base_again or not self._answered(manifest.policy_version):
                await self._begin_snapshot()

    def _answered(self, policy_version: int) -> bool:
        """Tell whether the snapshot was stored for somebody a moment ago: the same once more would not
        help."""
        version, again_s = self._answer_given
        if version == policy_version and time.monotonic() < again_s:
            return True
        self._answer_given = policy_version, time.monotonic() + SAME_SNAPSHOT_PAUSE_S
        return False

    def _forget_damaged_base(self) -> bool:
        """Let the base be stored again, unless it was a moment ago; tell whether it will be. The store knows
        that its bytes are there, and not that they are the right ones."""
        if self._base is None or time.monotonic() < self._base_again_s:
            return False
        self._adapted, self._base_again_s = None, time.monotonic() + SAME_SNAPSHOT_PAUSE_S
        return True

    async def close(self) -> None:
        """Serve no longer; what is not written yet of a snapshot is given up."""
        await self._snapshots.close()
        await self._store.close()

    def pin(self, policy_version: int) -> None:
        """Keep a version until it is unpinned, or until `MOST_PINNED` later ones are pinned."""
        self._pinned.add(policy_version)
        for forgotten in sorted(self._pinned)[:-MOST_PINNED]:
            log.warning("evaluation_forgotten", policy_version=forgotten, pinned_since=MOST_PINNED)
            self._pinned.discard(forgotten)

    def unpin(self, policy_version: int) -> None:
        """The version may go when its turn comes."""
        self._pinned.discard(policy_version)

    # --- one publication ---

    async def _as_delta(self, tensors: Tensors, announcement: Announcement) -> PolicyManifest | None:
        """Publish what changed since the version before; return None where that is nearly everything."""
        base, before = self._weights, self.latest
        if base is None or before is None:
            return None
        again = announcement.policy_version == base.policy_version
        if again and lent_among(base.tensors) is not None:
            return await self._again(base, before, tensors, announcement)
        if not again and self._is_whole(announcement.policy_version):
            return None
        delta, rest = await self._encoded(base, tensors, announcement.policy_version)
        if delta is None:
            self._whole_before = announcement.policy_version + 1 + WHOLE_AFTERWARDS
            return None
        self._note_unchanged(
            announcement.policy_version, unchanged=announcement.is_trained and not (again or delta.sent_words)
        )
        if again and delta.sent_words:
            raise ValueError(f"version {announcement.policy_version} was published with other weights")
        deltas = before.deltas
        if not again:
            blob = await self._put([delta.data], announcement.policy_version, "delta")
            versions = {"base_version": base.policy_version, "policy_version": announcement.policy_version}
            deltas += (DeltaRef(**versions, blob=blob, rest=rest),)
        self._note(delta.weights, () if again else deltas[-1].blobs, delta.sent_words)
        return await self._announce(
            delta.weights, announcement, before.snapshot_blobs, before.snapshot_at, deltas
        )

    async def _again(
        self, base: Weights, before: PolicyManifest, tensors: Tensors, announcement: Announcement
    ) -> PolicyManifest:
        """Announce the version once more: what it was read from may have changed, but its digests stay."""
        digests = await asyncio.to_thread(self._encoder.digests, tensors)
        if digests != base.digests:
            raise ValueError(f"version {announcement.policy_version} was published with other weights")
        weights = Weights(base.policy_version, tensors, digests)
        self._note_unchanged(base.policy_version, unchanged=False)
        self._note(weights, (), 0)
        return await self._announce(
            weights, announcement, before.snapshot_blobs, before.snapshot_at, before.deltas
        )

    def _is_whole(self, policy_version: int) -> bool:
        """Tell whether no delta of a new version is tried."""
        return self._config.snapshot_every == 1 or policy_version < self._whole_before

    async def _as_snapshot(self, tensors: Tensors, announcement: Announcement) -> PolicyManifest:
        weights, snapshot = await self._stored_whole(announcement.policy_version, tensors)
        before = self._weights
        same = before is not None and before.digests == weights.digests
        again = before is not None and before.policy_version == weights.policy_version
        self._note_unchanged(weights.policy_version, unchanged=announcement.is_trained and same and not again)
        self._note(weights, snapshot, weights.words)
        return await self._announce(weights, announcement, snapshot, announcement.policy_version)

    async def _begin_snapshot(self) -> None:
        """Write a snapshot of the announced weights beside what comes next, unless one is being written."""
        if self._snapshots.busy:
            return
        weights = self._announced_weights()
        if not await asyncio.to_thread(_in_own_memory, weights):
            return  # training has changed them: the next version comes with a snapshot
        version, others = weights.policy_version, self._others
        tokens = self._incarnation, version, SNAPSHOT

        async def write(content: Content) -> bool:
            mine, rest, announces = set[BlobRef](), tuple[BlobRef, ...](), True
            try:
                mine.add(await self._store.put(content, *tokens))
                rest = await others.written(SNAPSHOT) if others else ()
            except BusError as error:  # deltas lead on from the one before; a later version has the next
                log.warning("snapshot_not_published", policy_version=version, reason=str(error))
                announces = False
            async with self._one:
                self._stored |= mine
                if others is not None:
                    await others.end(SNAPSHOT)
                if announces:
                    await self._announce_snapshot((*mine, *rest), version)
                await self._retire()
            return announces

        if others is not None:
            await others.begin_snapshot(SNAPSHOT, version, tokens)
        mine = Weights(version, own(weights.tensors), weights.digests)
        await self._snapshots.begin(mine, write, ranks=self._ranks)

    async def _announce_snapshot(self, blobs: tuple[BlobRef, ...], version: int) -> None:
        latest = self._latest()
        if latest.since(version) is None:  # a later version was sent whole meanwhile
            return
        intact = await self._hold(latest)  # deltas are for those who need no snapshot
        deltas = latest.since(latest.snapshot_at if intact else version) or ()
        await self._announce_again(blobs, version, deltas)

    async def _announce_again(
        self, snapshot: tuple[BlobRef, ...], version: int, deltas: tuple[DeltaRef, ...]
    ) -> None:
        latest = self._latest()
        if latest.adapted is not None and self._adapted is None:
            return  # the base is lost and could not be stored yet: the next version comes with both
        announcement = Announcement(
            latest.policy_version, latest.stage, latest.trains_from, latest.probe,
            ess_fraction=latest.ess_fraction,
        )  # fmt: skip
        await self._announce(self._announced_weights(), announcement, snapshot, version, deltas)

    async def _begin_kept(self) -> None:
        """Write a version that is to stay beside what comes next; a failure ends the learner."""
        weights, others = self._announced_weights(), self._others
        await asyncio.to_thread(_in_own_memory, weights)
        version, ranks = weights.policy_version, self._ranks
        tokens, directory = (self._incarnation, version, KEPT), await self._kept.begin(version)

        async def write(content: Content) -> bool:
            blob = await put_kept(self._store, content, directory, tokens, rank=0, ranks=ranks)
            rest = await others.written(KEPT) if others else ()
            await self._kept.finish(version, weights.tensors)
            async with self._one:
                self._stored.add(blob)
                if others is not None:
                    await others.end(KEPT)
                self._kept.name(version, (blob, *rest))
                self._keeping.discard(version)
                latest = self._latest()
                await self._announce_again(latest.snapshot_blobs, latest.snapshot_at, latest.deltas)
            return True

        self._keeping.add(version)
        if others is not None:
            await others.begin_snapshot(KEPT, version, tokens, directory)
        mine = Weights(version, own(weights.tensors), weights.digests)
        await self._snapshots.begin(mine, write, ranks=ranks)

    @property
    def _ranks(self) -> int:
        return 1 if self._others is None else self._others.ranks

    def _latest(self) -> PolicyManifest:
        if self.latest is None:
            raise RuntimeError("nothing was published")
        return self.latest

    def _announced_weights(self) -> Weights:
        if self._weights is None:
            raise RuntimeError("nothing was published")
        return self._weights

    async def _announce(
        self, weights: Weights, announcement: Announcement, snapshot: tuple[BlobRef, ...],
        snapshot_version: int, deltas: tuple[DeltaRef, ...] = (),
    ) -> PolicyManifest:  # fmt: skip
        """Make the weights the run's policy: a key for those who come later, a notice for those here."""
        if self._model is None:
            raise RuntimeError("the publisher was not started: call `start` first")
        kept = await self._kept.before(weights, self._put_kept)
        manifest = PolicyManifest(
            policy_version=announcement.policy_version,
            incarnation=self._incarnation,
            snapshot=snapshot[0],
            snapshot_rest=snapshot[1:],
            model=self._model,
            stage=announcement.stage,
            trains_from=announcement.trains_from,
            snapshot_version=snapshot_version,
            deltas=deltas,
            probe=announcement.probe,
            kept=kept,
            keeping=tuple(sorted(self._keeping)),
            ess_fraction=announcement.ess_fraction,
            pause_reason=self._pause_reason(),
            adapted=self._adapted,
            kernels=self._kernels,
        )
        self.latest = self._held[manifest.policy_version] = manifest
        self._weights = weights  # not before: a snapshot is of the version that is announced
        await self._set_policy(manifest)
        await self._bus.notify(self._bus.subject("notice", "policy"), manifest)
        return manifest

    async def _set_policy(self, manifest: PolicyManifest) -> None:
        """Set the run's policy. Raises `FencedError` if another learner has set it and has the role."""

        async def swapped() -> bool:
            revision = await self._bus.swap("policy", manifest, self._revision)
            self._revision = self._revision if revision is None else revision
            return revision is not None

        while not await self._bus.patiently(swapped, "announcing a version"):
            found = await self._bus.get("policy", PolicyManifest)
            if found is not None and found[0].incarnation != self._incarnation:
                await self._refuse_successor(found[0])
            # else the answer to an earlier swap was lost, or the bus has lost the key
            self._revision = found[1] if found else 0

    async def _refuse_successor(self, found: PolicyManifest) -> None:
        """Raise `FencedError` unless this learner has the role: then the bus was set back in time."""
        holder = await self._bus.get_settled("role.learner", RoleHolder)
        if holder is None or holder[0].incarnation != self._incarnation:
            raise FencedError(
                f"learner {found.incarnation} has announced version {found.policy_version} of run "
                f"{self._bus.topology.run!r}: this learner was replaced, and stops"
            )

    async def _mended(self) -> bool:
        """Tell whether all that was published is there; else the bus or a disk lost it, and a snapshot is
        due."""
        if self._model is not None and not await on_bus(self._bus, [self._model]):
            await self._put_model()
        intact = self.latest is None or await self._hold(self.latest)
        if self.latest is not None and not intact:
            log.warning("published_weights_are_gone", policy_version=self.latest.policy_version)
            self._kept.forget_published()
            self._adapted = None
        await self._put_base()
        return intact

    async def _hold(self, manifest: PolicyManifest) -> bool:
        """Tell whether all that a manifest needs is there, here or where other ranks stored it."""
        blobs = blobs_of(manifest)
        if self._others is None:
            return await self._store.holds(blobs)
        mine = blobs & self._stored
        return await self._store.holds(mine) and await self._others.hold_all(blobs - mine)

    async def _retire(self) -> None:
        """Forget versions that are neither new nor pinned, and free what no version left needs."""
        old = list(self._held)[: -self._config.keep]
        for version in (v for v in old if v not in self._pinned):
            del self._held[version]
        needed = {blob for manifest in self._held.values() for blob in blobs_of(manifest)}
        if self._others is not None:
            await self._others.retire(needed - self._stored)
        self._stored -= await delete_blobs(self._store, self._stored - needed)

    def _on_wanted(self, wanted: SnapshotWanted) -> None:
        if wanted.incarnation in ("", self._incarnation):
            log.debug("snapshot_wanted", policy_version=wanted.policy_version, reason=wanted.reason)
            self._wanted = wanted

    # --- bytes ---

    async def _in_format(self, tensors: Tensors, policy_version: int) -> Tensors:
        """Return all weights as they are published, those of other ranks among them; the first time the
        model's config is, too."""
        found, others = self._encoder.format, self._others
        if found is not None and self._model is None and self._files is not None:
            shapes = others.shapes(tensors) if others else {name: one.shape for name, one in tensors.items()}
            self._files = with_quantisation(self._files, quantisation_config(found, shapes))
            await self._put_model()
        mine = await asyncio.to_thread(self._encoder.in_format, tensors)
        if others is None:
            return mine
        return await asyncio.to_thread(others.with_theirs, mine, self._encoder, policy_version)

    async def _encoded(
        self, base: Weights, tensors: Tensors, policy_version: int
    ) -> tuple[Delta | None, tuple[BlobRef, ...]]:
        """Return the delta, and where other ranks stored the rest of it; None for one that is not worth it,
        of another version than `base`."""
        most = int(WORTH_IT * base.size_bytes) if policy_version != base.policy_version else sys.maxsize
        tokens = self._incarnation, policy_version, "delta"
        theirs = self._others and asyncio.create_task(self._others.encoded(policy_version, most, tokens))
        mine = await asyncio.to_thread(self._encoder.encoded, base, own(tensors), most_bytes=most)
        shares = await theirs if theirs else []
        encoded = [mine, *(None if share is None else share.encoded for share in shares)]
        join = partial(joined_delta, base, policy_version, tensors, encoded, most_bytes=most)
        return await asyncio.to_thread(join), tuple(blob for share in shares if share for blob in share.blobs)

    async def _stored_whole(
        self, policy_version: int, tensors: Tensors
    ) -> tuple[Weights, tuple[BlobRef, ...]]:
        """Store all weights, those of other ranks where these are; return them and where they are."""
        mine, tokens = own(tensors), (self._incarnation, policy_version, "snapshot")
        theirs = self._others and asyncio.create_task(self._others.snapshot(policy_version, tokens))
        digests = dict(await asyncio.to_thread(self._encoder.digests, mine))
        content = await asyncio.to_thread(snapshot_content, Weights(policy_version, mine, digests))
        blobs = [await self._put(content, policy_version, "snapshot")]
        if theirs:
            stored = await theirs
            digests |= stored.digests
            blobs += stored.blobs
        return Weights(policy_version, tensors, {name: digests[name] for name in tensors}), tuple(blobs)

    async def _put_model(self) -> None:
        if self._files is None:
            raise RuntimeError("the publisher was not started: call `start` first")
        self._model = await put_only_blob(self._bus, self._publisher, encode(self._files), "model")

    async def _put_base(self) -> None:
        if self._base is None or self._adapted is not None:
            return
        theirs = self._others and asyncio.create_task(self._others.base((self._incarnation, "base")))
        mine = await asyncio.to_thread(self._base.weights)
        described, blobs = mine.described(), [await self._put(snapshot_content(mine), "base")]
        if theirs:
            stored = await theirs
            described |= stored.digests
            blobs += stored.blobs
        self._adapted = self._base.described(blobs, joined_digest(0, described).hex())

    async def _put_kept(self, files: Sequence[Path], version: int) -> tuple[BlobRef, ...]:
        """Store the files of a version that stays, each on the rank whose turn it is."""
        tokens, others = (self._incarnation, version, KEPT), self._others
        theirs = others and asyncio.create_task(others.put_files(files, tokens))
        mine = [await self._put(file_content(file), version, KEPT) for file in files[:: self._ranks]]
        return (*mine, *(await theirs if theirs else ()))

    async def _put(self, content: Content, *tokens: object) -> BlobRef:
        blob = await self._store.put(content, self._incarnation, *tokens)
        self._stored.add(blob)
        return blob

    def _note_unchanged(self, policy_version: int, *, unchanged: bool) -> None:
        """Keep an alarm, and log it once, when a version is to the bit the one before it."""
        before, self.alarm = self.alarm, ""
        if unchanged:
            because = f": {self._why_unchanged}" if self._why_unchanged else ""
            self.alarm = f"version {policy_version} is to the bit the one before it{because}"
        if unchanged and not before:
            log.warning("weights_unchanged", policy_version=policy_version, why=self._why_unchanged)

    def _note(self, weights: Weights, sent: tuple[BlobRef, ...], sent_words: int) -> None:
        self.figures = {
            "weights/wire_bytes": sum(blob.size_bytes for blob in sent),
            "weights/full_bytes": sum(blob.size_bytes for blob in self._adapted.blobs)
            if self._adapted
            else weights.size_bytes,
            "weights/sent_fraction": sent_words / max(1, weights.words),
            **self._snapshots.figures(),
        }


def _in_own_memory(weights: Weights) -> bool:
    """Give weights that are lent memory of their own; tell whether they are still there."""
    lent = lent_among(weights.tensors)
    return lent is None or lent.keep()
