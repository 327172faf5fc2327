"""An engine's weights on their way into a SGLang server: in files for as long as the server reads them."""

import json
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from actors.engines.sglang.changes import Changes, changes, whole
from actors.engines.sglang.client.tensor_files import NAMES, State, bytes_of, raw, write_tensors
from bus.errors import ConfigError, EngineError
from storage.disk.atomic_files import try_lock
from storage.model_files.packed_files import QUANTISATION, is_quantised_model
from storage.weights.tensors import spare_threads

IN_MEMORY = Path("/dev/shm")
PREFIX = "sluice-weights-"
SETTLED_S = 60.0
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What config.json calls their number."""
BUCKET_BYTES = 256 << 20
"""Bytes of tensors in the body of one request."""
FILE_BYTES = 1 << 30
"""Bytes of tensors in one file. One thread writes it, since two cannot write to a file at once."""


class HeldWeights:
    """The newest weights of one engine, and the files in which a server reads them. The tensors are those
    that it was given, not copies. Files exist from `write` on until `drop`: they have what the server is to
    take. Beside it in `directory` lies the model's config."""

    def __init__(self, model_dir: Path, parent: Path | None) -> None:
        parent = parent or (IN_MEMORY if IN_MEMORY.is_dir() else Path(tempfile.gettempdir()))
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent)
        self._root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._lock = (self._root / "lock").open("w")
        locked = try_lock(self._lock)
        assert locked  # nobody else knows this new directory
        self.source = model_dir
        self.directory = self._root / "model"
        shutil.copytree(model_dir, self.directory, ignore=shutil.ignore_patterns("*.safetensors*"))
        self.config: Mapping[str, Any] = json.loads((model_dir / "config.json").read_text())
        config = self.config
        self.model_type = str(config.get("model_type", ""))
        self.has_experts = any(config.get(name) for name in EXPERTS)
        self.quantised = is_quantised_model(model_dir)
        """Whether the weights are quantised: a server takes these as whole tensors only."""
        self._in_fp8 = self.quantised and config[QUANTISATION].get("quant_method") == "fp8"
        self.policy_version = -1
        """Version of the tensors; -1 when there are none yet."""
        self._tensors: dict[str, torch.Tensor] = {}
        self._writes = 0

    @property
    def files(self) -> list[Path]:
        """Return files that exist; no file written later has the name of one of them."""
        return sorted(self.directory.glob("*.safetensors"))

    @property
    def tensors(self) -> State:
        return self._tensors

    def has(self, state: State) -> bool:
        """Return whether these tensors are held, to the bit; what is the same memory is not compared."""
        return all(
            name in self._tensors and _same(self._tensors[name], tensor) for name, tensor in state.items()
        )

    def keep(self, state: State, policy_version: int) -> None:
        """Take the tensors, the first time all of them. Raises `EngineError`, and takes none, when they are
        another model's, and `ConfigError` when the first are in fp8 and the model is not, or the reverse."""
        self._check(state)
        self._tensors.update(state)
        self.policy_version = policy_version

    def write(self, state: State) -> Path:
        """Return a directory with files that hold these. Raises `ConfigError` when it has no room. Files are
        made anew each time: a server may have those before mapped."""
        if unknown := [name for name, tensor in state.items() if tensor.dtype not in NAMES]:
            dtype = state[unknown[0]].dtype
            raise EngineError(f"tensor {unknown[0]} is {dtype}, which no safetensors file can hold")
        parts = list(buckets(state, FILE_BYTES))
        paths = self._anew(*(f"model-{number:05}" for number in range(len(parts))))
        with self._room_for(state), ThreadPoolExecutor(spare_threads(), "write") as threads:
            list(threads.map(write_tensors, paths, parts))
        return self.directory

    def write_changes(self, state: State) -> Path | None:
        """Return a file with the elements that these have anew, for a server that has what is held. `None`
        where it would be large, or cannot be told: then `write` them. Raises `EngineError` for another
        model's tensors, `ConfigError` when there is no room."""
        self._check(state)
        found = changes(self._tensors, state)
        return None if found is None else self._written(found)

    def write_whole(self, state: State) -> Path:
        """Return a file with all of these, for a server whose nodes each write them in or end. Of a directory
        that a node cannot read SGLang would say nothing: its ranks would go on with older weights. Raises
        `ConfigError` when there is no room."""
        return self._written(whole(state))

    def _written(self, found: Changes) -> Path:
        [path] = self._anew("changes")
        with self._room_for(found.tensors):
            write_tensors(path, found.tensors, found.metadata)
        return path

    def drop(self, files: Iterable[Path]) -> None:
        """Remove files, which were read; a server that still has them mapped keeps their pages."""
        for file in files:
            file.unlink(missing_ok=True)

    def _anew(self, *names: str) -> list[Path]:
        """Return the paths of new files; those that are there go."""
        self.drop(self.files)
        self._writes += 1
        return [self.directory / f"{name}-{self._writes}.safetensors" for name in names]

    def smallest(self) -> State:
        """Return the tensor of the fewest bytes. Raises `EngineError` when none is held."""
        if not self._tensors:
            raise EngineError("the first weights of an engine must be all of them: there were none")
        name = min(self._tensors, key=lambda name: self._tensors[name].nbytes)
        return {name: self._tensors[name]}

    def forget(self) -> None:
        """Hold no weights any more: the next are all of them."""
        self._tensors = {}
        self.policy_version = -1

    def close(self) -> None:
        self._tensors.clear()
        shutil.rmtree(self._root, ignore_errors=True)
        self._lock.close()

    @contextmanager
    def _room_for(self, state: State) -> Iterator[None]:
        """Inside, files of these are written. Raises `ConfigError` where there is no room, and drops them."""
        try:
            yield
        except OSError as error:
            self.drop(self.files)
            raise ConfigError(
                f"no room for {bytes_of(state):,} bytes of weights in {self.directory} ({error.strerror}): "
                "name a larger place with actors.engine.weights_directory"
            ) from error

    def _check(self, state: State) -> None:
        if self.policy_version < 0:
            self._refuse_other_format(state)
            return
        for name, tensor in state.items():
            held = self._tensors.get(name)
            if held is None:
                raise EngineError(f"tensor {name} is not one of this model: another model's weights?")
            if held.shape != tensor.shape or held.dtype != tensor.dtype:
                raise EngineError(
                    f"tensor {name} is {tensor.dtype} {tuple(tensor.shape)}, "
                    f"and was {held.dtype} {tuple(held.shape)}"
                )

    def _refuse_other_format(self, state: State) -> None:
        codes = any(tensor.dtype == torch.float8_e4m3fn for tensor in state.values())
        if codes != self._in_fp8:
            are, model = ("", "not ") if codes else ("not ", "")
            raise ConfigError(
                f"these weights are {are}in fp8, and by its config.json the model is {model}so: after a "
                "change of learner.publication.quantisation, start this actor again"
            )


def _same(held: torch.Tensor, tensor: torch.Tensor) -> bool:
    if held.dtype != tensor.dtype or held.shape != tensor.shape:
        return False
    if held.data_ptr() == tensor.data_ptr() and held.stride() == tensor.stride():
        return True
    return torch.equal(raw(held), raw(tensor))


def buckets(state: State, size_bytes: int = BUCKET_BYTES) -> Iterator[dict[str, torch.Tensor]]:
    """Yield tensors together as far as they are small, in order; a larger one is alone."""
    bucket: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if bucket and bytes_of(bucket) + tensor.nbytes > size_bytes:
            yield bucket
            bucket = {}
        bucket[name] = tensor
    if bucket:
        yield bucket


def _sweep(parent: Path) -> None:
    """Remove what processes left behind that were killed: nobody holds their lock, old enough to be held."""
    for lock in parent.glob(f"{PREFIX}*/lock"):
        try:
            if time.time() - lock.stat().st_mtime < SETTLED_S:
                continue
            with lock.open("r+") as held:
                if try_lock(held):
                    shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:  # the directory was removed meanwhile, or is another user's
            continue
