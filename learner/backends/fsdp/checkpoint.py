"""A checkpoint of this backend, in torch.distributed.checkpoint's files: any number of ranks loads it.

torch's own `save` and `async_save` copy and write in one go, or with collectives on a thread of their own.
Here the state is copied, a thread of the caller writes the copies, and the collectives are those of `stage`
and `StagedShards.finalize`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from bus.errors import StorageError
from learner.backends.fsdp.weights import local
from learner.distributed.process_group import gathered
from learner.host_memory.copies import CopyBuffers, StateCopies
from learner.model_directories.checkpoint_manifest import file_digest

MODEL = "model."
"""Begins the names of the weights in the files."""
Entries = Mapping[str, Tensor]
"""Tensors by their names in the files: `DTensor`s, or plain ones that all ranks have and one writes."""


def like(parameter: Tensor, mine: Tensor) -> Tensor:
    """Return a tensor that is cut over the ranks as `parameter` is, of which this rank has `mine`."""
    if not isinstance(parameter, DTensor):
        return mine
    spec = parameter._spec
    shape = TensorMeta(parameter.shape, parameter.stride(), mine.dtype)
    return DTensor(  # type: ignore[no-untyped-call]
        mine, DTensorSpec(spec.mesh, spec.placements, tensor_meta=shape), requires_grad=False
    )


class _CopiesPlanner(DefaultSavePlanner):
    def __init__(self, names: Iterable[str], copies: StateCopies) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._numbers = {name: number for number, name in enumerate(names)}
        self._copies = copies

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._copies.take(self._numbers[write_item.index.fqn])


@dataclass
class StagedShards:
    """Copies of a rank's part of a checkpoint, which are not written yet."""

    plan: SavePlan
    planner: _CopiesPlanner
    writer: FileSystemWriter
    metadata: Metadata
    directory: Path
    copies: StateCopies
    """What is written: `keep` must be called before it changes."""
    results: list[WriteResult]

    def write(self) -> dict[str, str]:
        """Write this rank's file, without any collective; return its digest by name."""
        self.results = self.writer.write_data(self.plan, self.planner).wait()
        self.planner.state_dict = {}  # the tensors that are written may be freed
        files = {result.storage_data.relative_path for result in self.results}
        return {name: file_digest(self.directory / name) for name in sorted(files)}

    def finalize(self) -> None:
        """Write the metadata of all files. Every rank calls this, on the thread of its collectives."""
        results = gathered(self.results)
        if dist.get_rank() == 0:
            self.writer.finish(self.metadata, results)


def stage(entries: Entries, directory: Path, buffers: CopyBuffers) -> StagedShards:
    """Begin to copy what this rank has of `entries`, to be written there. Every rank calls this."""
    copies = buffers.copies([local(tensor) for tensor in entries.values()])
    planner = _CopiesPlanner(entries, copies)
    # Copying ahead would have the thread that writes wait for CUDA's device 0, whichever is this rank's.
    writer = FileSystemWriter(directory, per_thread_copy_ahead=0)
    is_first = dist.get_rank() == 0
    planner.set_up_planner(dict(entries), writer.storage_meta(), is_first)
    writer.set_up_storage_writer(is_first, rank=dist.get_rank())
    plans = gathered(writer.prepare_local_plan(planner.create_local_plan()))
    # Every rank makes the plan of all, which is the same on each: nothing has to be sent back.
    plans, metadata = planner.create_global_plan(plans)
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[dist.get_rank()])
    return StagedShards(plan, planner, writer, metadata, directory, copies, [])


def load(entries: Entries, directory: Path) -> None:
    """Fill `entries`, in place. Every rank calls this. Raises `StorageError` if it cannot be read."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        read(dict(entries), storage_reader=FileSystemReader(directory), planner=planner)
    except (CheckpointException, RuntimeError, OSError, KeyError) as error:
        raise StorageError(f"cannot read checkpoint {directory}: {error}") from error


def load_alone(entries: Entries, directory: Path) -> None:
    """Fill `entries`, in place, without other ranks; torch's own function warns that there are none."""
    reader = FileSystemReader(directory)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = reader.read_metadata()
    planner.set_up_planner(dict(entries), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()


def generator_states() -> dict[str, Tensor]:
    """Return the states of this rank's random generators, by names of its own."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {f"rng.{dist.get_rank()}.{kind}": state for kind, state in states.items()}


def restore_generators(states: Mapping[str, Any]) -> None:
    """Go on with what `generator_states` returned."""
    for name, state in states.items():
        if name.endswith(".cpu"):
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state)
