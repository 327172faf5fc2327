"""A copy of the engine's weights in one safetensors file, where a SGLang server reads them."""

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from bus.errors import ConfigError, EngineError
from storage.weights import TORCH_DTYPES

IN_MEMORY = Path("/dev/shm")
PREFIX = "sluice-weights-"
SETTLED_S = 60.0
BUCKET_BYTES = 256 << 20
"""Of tensors in the body of one request."""
NAMES = {getattr(torch, dtype): name for name, dtype in TORCH_DTYPES.items()}
State = Mapping[str, torch.Tensor]


class HeldWeights:
    """The newest weights, whole, in `directory` beside the model's config: where a server reads them.

    Tensors are copied in where they lie in the file, so it is as large as the model. Where there is room,
    those that changed lie in a file of their own besides, which is at most half as large."""

    def __init__(self, model_dir: Path, parent: Path | None) -> None:
        parent = parent or (IN_MEMORY if IN_MEMORY.is_dir() else Path(tempfile.gettempdir()))
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent)
        self._root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._lock = (self._root / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.directory = self._root / "model"
        shutil.copytree(model_dir, self.directory, ignore=shutil.ignore_patterns("*.safetensors*"))
        self.policy_version = -1
        """What is in the file; -1 when there is none yet."""
        self._changed = self._root / "changed"
        self._layout: dict[str, _Place] = {}

    def keep(self, state: State, policy_version: int) -> Path:
        """Take the tensors, the first time all of them; return a directory that holds the changed ones.

        That is the one of all weights if there is no room to have these once more. Raises `EngineError`, and
        takes none, when they are another model's; `ConfigError` when there is no room for all of them."""
        file = self.directory / "model.safetensors"
        if self.policy_version < 0:
            self._layout = _create(file, state)
        else:
            self._check(state)
        _fill(file, self._layout, state)
        self.policy_version = policy_version
        if 2 * _size(state) >= _size_of(self._layout):
            return self.directory
        self._changed.mkdir(exist_ok=True)
        changed = self._changed / "model.safetensors"
        changed.unlink(missing_ok=True)  # a server may still have the old one mapped
        try:
            places = _create(changed, state)
        except ConfigError:  # then the server reads all of it
            changed.unlink(missing_ok=True)
            return self.directory
        _fill(changed, places, state)
        return self._changed

    def smallest(self) -> State:
        """The tensor of the fewest bytes. Raises `EngineError` when none is held."""
        if not self._layout:
            raise EngineError("the first weights of an engine must be all of them: there were none")
        name = min(self._layout, key=lambda name: self._layout[name].end - self._layout[name].start)
        with safe_open(self.directory / "model.safetensors", framework="pt") as file:
            return {name: file.get_tensor(name)}

    def close(self) -> None:
        """Remove the files."""
        shutil.rmtree(self._root, ignore_errors=True)
        self._lock.close()

    def _check(self, state: State) -> None:
        for name, tensor in state.items():
            place = self._layout.get(name)
            if place is None:
                raise EngineError(f"tensor {name} is not one of this model: another model's weights?")
            if place.shape != tuple(tensor.shape) or place.dtype != tensor.dtype:
                raise EngineError(
                    f"tensor {name} is {tensor.dtype} {tuple(tensor.shape)}, "
                    f"and was {place.dtype} {place.shape}"
                )


class _Place:
    """Where a tensor's bytes lie in a file."""

    def __init__(self, tensor: torch.Tensor, start: int) -> None:
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)
        self.start, self.end = start, start + tensor.numel() * tensor.element_size()


def buckets(state: State, size_bytes: int = BUCKET_BYTES) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors together as far as they are small, in order; a larger one is alone."""
    bucket: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if bucket and _size(bucket) + tensor.nbytes > size_bytes:
            yield bucket
            bucket = {}
        bucket[name] = tensor
    if bucket:
        yield bucket


def _create(file: Path, state: State) -> dict[str, _Place]:
    """Write a safetensors file's header, with room for the tensors; return where they belong."""
    end, header, places = 0, {}, {}
    for name, tensor in state.items():
        if tensor.dtype not in NAMES:
            raise EngineError(f"tensor {name} is {tensor.dtype}, which no safetensors file can hold")
        places[name] = place = _Place(tensor, end)
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, place.end],
        }
        end = place.end
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    size_bytes = 8 + len(text) + end
    try:
        with file.open("wb") as out:
            os.posix_fallocate(out.fileno(), 0, size_bytes)  # else a full disk would kill us, by SIGBUS
            out.write(len(text).to_bytes(8, "little") + text)
    except OSError as error:
        raise ConfigError(
            f"no room for {size_bytes:,} bytes of weights in {file.parent} ({error.strerror}): "
            "name a larger place with actors.engine.weights_directory"
        ) from error
    for place in places.values():
        place.start, place.end = place.start + 8 + len(text), place.end + 8 + len(text)
    return places


def _fill(file: Path, places: Mapping[str, _Place], state: State) -> None:
    """Copy tensors to their places."""
    data = np.memmap(file, np.uint8, "r+")
    for name, tensor in state.items():
        place = places[name]
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        data[place.start : place.end] = raw
    data.flush()


def _size(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def _size_of(layout: Mapping[str, _Place]) -> int:
    return sum(place.end - place.start for place in layout.values())


def _sweep(parent: Path) -> None:
    """Remove what processes left behind that were killed: nobody holds their lock, old enough to be held."""
    for lock in parent.glob(f"{PREFIX}*/lock"):
        try:
            if time.time() - lock.stat().st_mtime < SETTLED_S:
                continue
            with lock.open("r+") as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:  # it is alive, or was removed meanwhile, or is another user's
            continue
