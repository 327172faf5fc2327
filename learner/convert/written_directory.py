"""Directories of weights that are written tensor by tensor, and appear when all was read back as it was
written."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from bus.errors import ConfigError, StorageError
from bus.process.work_progress import Advance, long_work, tracked, uncounted
from learner.model_directories.lazy_weights import LazyWeights, Spec, tensor_digest
from storage.disk.atomic_files import make_directory, publish, temporary_sibling
from storage.disk.file_errors import naming, unwritable


@dataclass(frozen=True)
class Converted:
    """Account of what was written and read back."""

    directory: Path
    tensors: int
    size_bytes: int
    beside: int = 0
    """Tensors among them that are no part of what is trained."""

    def __str__(self) -> str:
        heads = f", {self.beside} of them of heads for several next tokens" if self.beside else ""
        written = f"{self.tensors} tensors, {self.size_bytes / 1e9:.3f} GB, verified"
        return f"wrote {self.directory}: {written}{heads}"


class Digesting(LazyWeights):
    """Notes the digest of every tensor that is read."""

    def __init__(self, weights: LazyWeights) -> None:
        super().__init__(weights)
        self.digests: dict[str, str] = {}
        self._weights = weights
        self._advance: Advance = uncounted

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._weights[name]
        self.digests[name] = tensor_digest(tensor)
        self._advance(tensor.nbytes)
        return tensor

    @contextmanager
    def shown(self, what: str) -> Iterator[None]:
        """Show how many of all bytes are read inside."""
        with long_work(what, sum(self.spec(name).size_bytes for name in self)) as self._advance:
            yield

    def spec(self, name: str) -> Spec:
        """Return shape and dtype of a tensor, unread."""
        return self._weights.spec(name)


def verified_size(written: LazyWeights, digests: Mapping[str, str]) -> int:
    """Read everything back, and return its size in bytes. Raises `StorageError` where a bit differs."""
    reading = tracked(digests.items(), "reading back what was written")
    if differing := [name for name, digest in reading if tensor_digest(written[name]) != digest]:
        raise StorageError(
            f"what was written reads back otherwise: {', '.join(differing)}; is the disk sound?"
        )
    return sum(written.spec(name).size_bytes for name in digests)


def refuse_existing(target: Path) -> None:
    """Raise `ConfigError` for a directory that is there already."""
    if target.exists():
        raise ConfigError(f"{target} exists already: remove it, or choose another")


@contextmanager
def filling(target: Path) -> Iterator[Path]:
    """Give a directory to fill; it becomes `target` at the end, or nothing is left of it."""
    temporary = temporary_sibling(target)
    make_directory(target.absolute().parent)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with naming(target):
            temporary.mkdir()
            yield temporary
            publish(temporary, target)
    except OSError as error:
        raise unwritable(target, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
