"""The learner's state in checkpoint directories (storage/disk/checkpoints.py), whatever backend trains.

Each holds the backend's files, the model's `config.json` and a manifest with where the backend stands and
what the caller wants kept with them (learner/model_directories/checkpoint_manifest.py). A directory gets its
name when all of it is on disk."""

import time
from collections.abc import Callable, Container, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from pydantic import JsonValue

from bus.errors import ConfigError, DiskFullError, StorageError
from bus.process.work_progress import long_work
from learner.backends.contract.backend import Backend, StagedFiles
from learner.distributed.process_group import gathered
from learner.model_directories.checkpoint_manifest import (
    amend_manifest,
    damaged_files,
    differences,
    read_manifest,
    refuse_damage,
    refuse_other_model,
    write_manifest,
    written_by,
)
from learner.model_directories.model_directory import load_hf_config
from storage.disk import checkpoints
from storage.disk.file_errors import file_error, naming

WRITING_TIMEOUT_S = 3600.0
"""A rank that has not written its files by then has failed."""


class PendingCheckpoint:
    """A checkpoint whose files are being written while training goes on; nobody sees it before `finish`."""

    def __init__(
        self,
        staged: StagedFiles,
        publish: Callable[[Mapping[str, str]], list[Path]],
        temporary: Path,
        final: Path,
        after: "PendingCheckpoint | None",
        seconds: dict[str, float],
    ) -> None:
        """Begin to write on a thread. `start_checkpoint` makes one of these."""
        self.finished = False
        self.seconds = seconds
        """Parts of the time that beginning took, and of that beside training once all is written."""
        self._staged = staged
        self._publish = publish
        self._final = final
        self._deadline = time.monotonic() + WRITING_TIMEOUT_S
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing = self._thread.submit(self._write, temporary, after)
        self._removing: Future[None] | None = None

    @property
    def written(self) -> bool:
        """Tell whether this rank's files are on disk, so that `finish` need not wait for them."""
        return self._writing.done()

    def _write(self, temporary: Path, after: "PendingCheckpoint | None") -> dict[str, str]:
        copies = self._staged.copies
        try:
            if after is not None:
                with naming(self._final.parent):
                    after.old_removed()
            began = time.perf_counter()
            digests = _written(self._staged, temporary, self._final)
        finally:
            copies.end()  # an update waits for what is left
        self.seconds |= {
            "write": time.perf_counter() - began, "copy": copies.copied_s, "held_up": copies.held_up_s,
        }  # fmt: skip
        return digests

    def finish(self) -> None:
        """Wait for the files of all ranks, and give the checkpoint its name; then it survives a power cut.

        Every rank calls this, at the same point between its other collectives. Once is enough. Raises
        `StorageError` on all of them when any could not write."""
        if self.finished:
            return
        self.finished = True
        self._raise_any(self._writing_failure())
        with naming(self._final):
            self._staged.finalize()
        digests = {name: digest for part in gathered(self._writing.result()) for name, digest in part.items()}
        failure = self._published(digests) if dist.get_rank() == 0 else NO_FAILURE
        self._thread.shutdown(wait=False)
        self._raise_any(failure)  # nobody commits before the checkpoint has its name

    def old_removed(self) -> None:
        """Wait until the checkpoints that this one took the place of are gone. Raises `OSError`. Any thread
        may call this."""
        if self._removing is not None:
            self._removing.result(WRITING_TIMEOUT_S)

    def amend(self, extra: Mapping[str, JsonValue]) -> None:
        """Keep `extra` with the checkpoint instead of what was kept. Every rank calls this. It is for a
        backend that has not changed since: nothing else is written."""
        self.finish()
        if dist.get_rank() == 0:
            amend_manifest(self._final, extra)
        dist.barrier()

    def _published(self, digests: Mapping[str, str]) -> "_WritingFailure":
        """Give the checkpoint its name, and begin to remove those that it takes the place of."""
        try:
            with naming(self._final):
                pruned = self._publish(digests)
        except (OSError, StorageError) as error:
            return _failure_of(error)
        self._removing = self._thread.submit(checkpoints.discard, pruned)
        return NO_FAILURE

    def _raise_any(self, failure: "_WritingFailure") -> None:
        """Raise `StorageError` on every rank if one has failed: one that raised alone would leave the others
        waiting."""
        failures = [each for each in gathered(failure) if each.said]
        if failures:
            kind = DiskFullError if any(each.disk_is_full for each in failures) else StorageError
            said = "; ".join(each.said for each in failures)
            raise kind(f"cannot write checkpoint {self._final}: {said}")

    def _writing_failure(self) -> "_WritingFailure":
        try:
            error = self._writing.exception(max(0.0, self._deadline - time.monotonic()))
        except TimeoutError:
            return _WritingFailure(f"rank {dist.get_rank()} is not done after {WRITING_TIMEOUT_S:.0f} s")
        return NO_FAILURE if error is None else _failure_of(error)


class _WritingFailure(NamedTuple):
    said: str
    disk_is_full: bool = False


NO_FAILURE = _WritingFailure("")


def _failure_of(error: BaseException) -> _WritingFailure:
    told = file_error(error) if isinstance(error, OSError) else error
    return _WritingFailure(f"rank {dist.get_rank()}: {told or error}", isinstance(told, DiskFullError))


def start_checkpoint(
    backend: Backend,
    root: Path,
    step: int,
    extra: Mapping[str, JsonValue],
    *,
    keep: int,
    besides: Container[int] = (),
    after: PendingCheckpoint | None = None,
) -> PendingCheckpoint:
    """Copy everything `load_checkpoint` needs, and begin to write it. Every rank calls this.

    There is one such checkpoint at a time: `after`, the one before, is finished first. Training does not wait
    for the removal of those that it took the place of, but on rank 0 the writing does: the disk never holds
    more of that rank than one checkpoint besides those to keep.

    Args:
        backend: may train on as soon as this returns.
        root: directory of the checkpoints.
        step: names the checkpoint; one of the same step is replaced.
        extra: kept with it; that of rank 0 counts.
        keep: how many of the newest checkpoints remain.
        besides: steps whose checkpoints remain whatever their age.
        after: the checkpoint before, if it may be unfinished."""
    began = time.perf_counter()
    if after is not None:
        after.finish()
    finished = time.perf_counter()
    if dist.get_rank() == 0:
        if after is None:  # else nothing is left over but what is being removed
            checkpoints.recover(root)
        checkpoints.temporary(root, step)
    dist.barrier()  # the directory is there before another rank writes into it
    made = time.perf_counter()
    temporary, final = checkpoints.temporary(root, step), checkpoints.directory(root, step)
    with naming(final):
        staged = backend.stage_checkpoint(temporary)
    training = backend.training_state()
    seconds = {"before": finished - began, "directory": made - finished, "memory": staged.copies.waited_s}
    seconds["state"] = time.perf_counter() - made - staged.copies.waited_s

    def publish(digests: Mapping[str, str]) -> list[Path]:
        backend.hf_config.save_pretrained(temporary)
        write_manifest(
            temporary, model=backend.fingerprint(), training=training, extra=extra, digests=digests
        )
        checkpoints.replace(temporary, final)
        return checkpoints.prune(root, keep, besides=besides)

    return PendingCheckpoint(staged, publish, temporary, final, after, seconds)


def _written(staged: StagedFiles, temporary: Path, final: Path) -> dict[str, str]:
    """Write this rank's files and show how far that is, as long as all are as large as those of a checkpoint
    before."""
    before = _size_before(final.parent)
    with naming(final), long_work(f"writing {final}", before, measured=lambda: _size_bytes(temporary)):
        return staged.write()


def _size_before(root: Path) -> int | None:
    """Return the size of the newest checkpoint on rank 0, which alone shows how far the next one is. None
    stands for one that cannot be told: the next one does not fail because of a figure."""
    if dist.get_rank() > 0:
        return None
    with suppress(OSError):  # such as a listing of a shared file system that names what is gone
        before = checkpoints.latest(root)
        return None if before is None else _size_bytes(before)
    return None


def _size_bytes(directory: Path) -> int:
    size_bytes = 0
    for path in directory.iterdir():
        with suppress(FileNotFoundError):
            size_bytes += path.stat().st_size
    return size_bytes


def save_checkpoint(
    backend: Backend, root: Path, step: int, extra: Mapping[str, JsonValue], *, keep: int
) -> None:
    """Write a checkpoint; on return it survives a power cut. Every rank calls this."""
    pending = start_checkpoint(backend, root, step, extra, keep=keep)
    pending.finish()
    pending.old_removed()


def load_checkpoint(backend: Backend, directory: Path, *, verified: bool = False) -> dict[str, JsonValue]:
    """Restore `backend` to what it was, and return what was saved as `extra`. Every rank calls this.

    `verified` files are not read once more to compare their digests: newest_checkpoint.py did it.
    Another number of ranks, or another layout of them, may have saved it; then their random generators go
    on as they are. Raises `StorageError` for a checkpoint that is missing or damaged, `ConfigError` for one
    of another model, or with other weights frozen."""
    manifest = read_manifest(directory)
    wrote, ours = written_by(manifest), backend.training_state().get("backend", "megatron")
    if wrote != ours:
        raise ConfigError(
            f"checkpoint {directory} was written with learner.backend={wrote}, not {ours}: set that again, "
            "or start a new run from its weights with --model.path"
        )
    if differences(manifest["model"], backend.fingerprint()):
        # the transformers that wrote it may have had fewer hyperparameters: its config.json is read anew
        refuse_other_model(directory, backend.other_hyperparameters(load_hf_config(directory)))
    training: dict[str, Any] | None = manifest["training"]
    if training is None:
        raise ConfigError(f"{directory} holds weights only: training starts from it with --model.path")
    backend.refuse_other_training(directory, training)  # before all files are read
    if not verified:
        refuse_damage(directory, damaged_on_any_rank(directory, manifest))
    with long_work(f"restoring {directory}"):
        backend.load_checkpoint(directory, training)
    return dict(manifest["extra"])


def read_extra(directory: Path) -> dict[str, JsonValue]:
    """Return what was saved as `extra`, before there is a backend to load. Raises `StorageError`."""
    return dict(read_manifest(directory)["extra"])


def damaged_on_any_rank(directory: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Return the files of a checkpoint that are damaged, on every rank. Each reads its share of the files."""
    share = sorted(manifest["files"])[dist.get_rank() :: dist.get_world_size()]
    return [name for names in gathered(damaged_files(directory, manifest, share)) for name in names]
