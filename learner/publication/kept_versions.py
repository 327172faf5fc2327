"""Versions that stay when later ones come, for opponents that are pinned to them."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator
from pathlib import Path

import structlog

from bus.errors import ConfigError
from bus.messages import BlobRef, KeptVersion
from storage.disk.atomic_files import Content, Data, publish_files, remove, remove_leftovers
from storage.model_files.adapter_names import are_adapters
from storage.weights.quantisation import published_as
from storage.weights.tensors import Weights, read_snapshot

log = structlog.get_logger()
Put = Callable[[Content, int, str], Awaitable[BlobRef]]
FILE = "model.safetensors"
READ_BYTES = 8 << 20


class KeptVersions:
    """Snapshots of some versions, as files too: a learner that resumes publishes them again. What the learner
    before it had published is freed when it begins, and a bus may lose its disk."""

    def __init__(self, versions: Collection[int], directory: Path | None, *, adapters: bool) -> None:
        """Keep `versions` in `directory`; without it they last as long as this learner and its bus. They are
        `adapters` alone, or whole weights."""
        self._adapters = adapters
        self._versions = frozenset(versions)
        self._directory = directory
        self._named: dict[int, KeptVersion] = {}
        self._looked = False

    async def before(self, weights: Weights, put: Put) -> tuple[KeptVersion, ...]:
        """Return the kept versions that are there when these weights are announced.

        Raises `ConfigError` where files have adapters and whole weights are published, or the reverse, and
        where they are quantised in another way than what is published.
        Files of later versions are of steps that a resumed learner has taken back, and go."""
        if self._versions and not self._looked:
            await self._take_over(weights, put)
        return tuple(self._named[version] for version in sorted(self._named))

    def lack(self, policy_version: int) -> bool:
        """Tell whether the version is to stay and is not there yet."""
        return policy_version in self._versions and policy_version not in self._named

    async def stored(self, version: int, content: Content, put: Put) -> BlobRef:
        """Write a version, first as a file, and return where it lies; `name` makes it known."""
        if self._directory is None:
            return await put(content, version, "kept")
        path = self._directory / f"version-{version}"
        self._directory.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(remove_leftovers, self._directory)  # of a learner that ended as it wrote
        if path.exists():
            await asyncio.to_thread(remove, path)
        await asyncio.to_thread(publish_files, path, {FILE: content})
        return await put(_content_of(path / FILE), version, "kept")

    def name(self, version: int, blob: BlobRef) -> None:
        """Have later announcements name a version that is stored."""
        self._named[version] = KeptVersion(policy_version=version, snapshot=blob)
        log.info("version_kept", policy_version=version)

    def forget_published(self) -> None:
        """Publish all kept versions again with the next one: the bus or a disk has lost some."""
        self._named = {}
        self._looked = False

    async def _take_over(self, newest: Weights, put: Put) -> None:
        self._looked = True
        if self._directory is None or not self._directory.is_dir():
            return
        for path in sorted(self._directory.glob("version-*")):
            number = path.name.removeprefix("version-")
            version = int(number) if number.isdecimal() else -1
            if version > newest.policy_version:
                await asyncio.to_thread(remove, path)
            elif version in self._versions:
                data = await asyncio.to_thread((path / FILE).read_bytes)
                kept = await asyncio.to_thread(read_snapshot, data, version)
                self._refuse_other_kind(path, kept)
                _refuse_other_format(path, kept, newest)
                blob = await put([data], version, "kept")
                self._named[version] = KeptVersion(policy_version=version, snapshot=blob)

    def _refuse_other_kind(self, path: Path, kept: Weights) -> None:
        """Raise `ConfigError` unless these are adapters just where adapters are published. The announcement
        says it once of all versions, and opponents would take one for the other."""
        if (adapters := are_adapters(kept.tensors)) == self._adapters:
            return
        what, publish = ("adapters", "adapter") if adapters else ("whole weights", "merged")
        raise ConfigError(
            f"learner.publication.keep_versions: {path} has {what}, and this learner publishes "
            f"{'whole weights' if adapters else 'adapters'}: set learner.lora.publish={publish} as it was "
            "before, or remove that directory"
        )


def _content_of(path: Path) -> Iterator[Data]:
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            yield piece


def _refuse_other_format(path: Path, kept: Weights, published: Weights) -> None:
    before, now = published_as(kept.tensors), published_as(published.tensors)
    if before != now:
        raise ConfigError(
            f"learner.publication.keep_versions: {path} was published with quantisation={before}, and this "
            f"learner publishes with {now}: set learner.publication.quantisation={before} as it was before, "
            "or remove that directory"
        )
