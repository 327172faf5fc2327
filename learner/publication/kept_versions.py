"""Versions that stay when later ones come, for opponents that are pinned to them."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from pathlib import Path

import structlog

from bus.errors import ConfigError, StorageError
from bus.messages import BlobRef, KeptVersion
from storage.disk.atomic_files import (
    Content,
    Data,
    publish,
    remove,
    remove_leftovers,
    temporary_sibling,
    write_json,
    write_parts,
)
from storage.disk.file_errors import writing
from storage.model_files.adapter_names import are_adapters
from storage.model_files.weight_files import INDEX_FILE, SINGLE_FILE, weight_files
from storage.weights.blob_stores import BlobStore
from storage.weights.local_model import names_in
from storage.weights.quantisation import published_as
from storage.weights.tensors import Weights

log = structlog.get_logger()
PutFiles = Callable[[Sequence[Path], int], Awaitable[tuple[BlobRef, ...]]]
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

    async def before(self, weights: Weights, put: PutFiles) -> tuple[KeptVersion, ...]:
        """Return the kept versions that are there when these weights are announced; `put` stores the files of
        one.

        Raises `ConfigError` where files have adapters and whole weights are published, or the reverse, and
        where they are quantised in another way than what is published.
        Files of later versions are of steps that a resumed learner has taken back, and go."""
        if self._versions and not self._looked:
            await self._take_over(weights, put)
        return tuple(self._named[version] for version in sorted(self._named))

    def lack(self, policy_version: int) -> bool:
        """Tell whether the version is to stay and is not there yet."""
        return policy_version in self._versions and policy_version not in self._named

    async def begin(self, version: int) -> Path | None:
        """Return a new directory, where each rank writes what it has of a version; None where none is
        written."""
        return (
            None if self._directory is None else await asyncio.to_thread(self._new, self._directory, version)
        )

    async def finish(self, version: int, names: Collection[str]) -> None:
        """Make the directory last, in which every rank has written its tensors; all have these names. Raises
        `StorageError` where files lack some."""
        if self._directory is not None:
            await asyncio.to_thread(_finish, self._directory / f"version-{version}", names)

    def name(self, version: int, blobs: Sequence[BlobRef]) -> None:
        """Have later announcements name a version that is stored there."""
        self._named[version] = KeptVersion(policy_version=version, snapshot=blobs[0], rest=tuple(blobs[1:]))
        log.info("version_kept", policy_version=version)

    def forget_published(self) -> None:
        """Publish all kept versions again with the next one: the bus or a disk has lost some."""
        self._named = {}
        self._looked = False

    def _new(self, directory: Path, version: int) -> Path:
        path = directory / f"version-{version}"
        with writing(path):
            directory.mkdir(parents=True, exist_ok=True)
            remove_leftovers(directory)  # of a learner that ended as it wrote
            if path.exists():
                remove(path)
            temporary_sibling(path).mkdir()
        return temporary_sibling(path)

    async def _take_over(self, newest: Weights, put: PutFiles) -> None:
        self._looked = True
        if self._directory is None or not self._directory.is_dir():
            return
        for path in sorted(self._directory.glob("version-*")):
            number = path.name.removeprefix("version-")
            version = int(number) if number.isdecimal() else -1
            if version > newest.policy_version:
                await asyncio.to_thread(remove, path)
            elif version in self._versions:
                files = [path / name for name in weight_files(path)]
                names = [name for file in files for name in await asyncio.to_thread(names_in, file)]
                self._refuse_other_kind(path, names)
                _refuse_other_format(path, names, newest)
                self.name(version, await put(files, version))

    def _refuse_other_kind(self, path: Path, names: Collection[str]) -> None:
        """Raise `ConfigError` unless these are adapters just where adapters are published. The announcement
        says it once of all versions, and opponents would take one for the other."""
        if (adapters := are_adapters(names)) == self._adapters:
            return
        what, publish = ("adapters", "adapter") if adapters else ("whole weights", "merged")
        raise ConfigError(
            f"learner.publication.keep_versions: {path} has {what}, and this learner publishes "
            f"{'whole weights' if adapters else 'adapters'}: set learner.lora.publish={publish} as it was "
            "before, or remove that directory"
        )


async def put_kept(
    store: BlobStore, content: Content, directory: Path | None, tokens: Sequence[object], *,
    rank: int, ranks: int,
) -> BlobRef:  # fmt: skip
    """Store what a rank has of a version that is to stay: first as a file in `directory`, if there is one."""
    if directory is None:
        return await store.put(content, *tokens)
    file = directory / (SINGLE_FILE if ranks == 1 else f"model-{rank + 1:05}-of-{ranks:05}.safetensors")
    await asyncio.to_thread(_write, file, content)
    return await store.put(file_content(file), *tokens)


def file_content(path: Path) -> Iterator[Data]:
    """Yield what a file has, of which a few megabytes are in memory at a time."""
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            yield piece


def _write(path: Path, content: Content) -> None:
    with writing(path), path.open("xb", buffering=0) as file:
        write_parts(file.fileno(), content)
        os.fsync(file.fileno())


def _finish(path: Path, names: Collection[str]) -> None:
    directory = temporary_sibling(path)
    files = sorted(directory.glob("*.safetensors"))
    found = {name: file.name for file in files for name in names_in(file)}
    if lacking := set(names) - found.keys():
        raise StorageError(
            f"{path} lacks {len(lacking)} tensors, as {min(lacking)}, though every rank of the learner wrote "
            "its own: mount the directory of runs on all hosts of the learner"
        )
    if len(files) > 1:
        write_json(directory / INDEX_FILE, {"metadata": {}, "weight_map": {**found}})
    publish(directory, path)


def _refuse_other_format(path: Path, names: Collection[str], published: Weights) -> None:
    before, now = published_as(names), published_as(published.tensors)
    if before != now:
        raise ConfigError(
            f"learner.publication.keep_versions: {path} was published with quantisation={before}, and this "
            f"learner publishes with {now}: set learner.publication.quantisation={before} as it was before, "
            "or remove that directory"
        )
