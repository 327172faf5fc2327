"""Tells for how long a checkpoint holds up training, and what it takes of the host's memory.

`python -m benchmarks.checkpoints --model qwen3-0.6b --directory DIR` prints it as JSON: a model with random
weights trains and is saved again and again, on the GPU if there is one, and under torchrun on several. A
`save` has the seconds of these parts:

- `begin_s` and `finish_s`: training stands still, between two steps, to begin and to finish the checkpoint;
- `parts_s`: of the beginning, ending the checkpoint `before`, making the `directory`, waiting for locked
  `memory`, listing the `state`; beside training, the `copy` and the `write`; on a CPU, how long an update was
  `held_up` until little was left to write;
- `step_s`: the steps beside the writing, of which the first also waits for copies that are not complete;
- `written_s`: until the files are durable.

`copy_limit_s` is the time in which the largest part of a rank goes to the host at 55 GB/s. `locking_step_s`
are the steps beside the locking of memory for copies, which takes `locked_s`; with `--unprepared` the first
save locks it. A disk needs room for two checkpoints, with `--alone` for one. Each save is also written to
stderr when it is done.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.learner import trainer_of
from benchmarks.learner_workloads import Workload
from benchmarks.model_shapes import SHAPES
from benchmarks.random_models import shape
from bus.codec import Json
from bus.process.process_tuning import few_collections
from launch.process.log_settings import configure_logging
from learner.algorithms.losses.objective import Objective
from learner.backends.contract.backend import Backend
from learner.backends.factory import BACKENDS, close_world, init_world
from learner.checkpoint.commit import start_checkpoint
from learner.config.loss import ReinforceLoss
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.distributed.process_group import gathered
from learner.host_memory.copies import CopyBuffers
from storage.disk import checkpoints

COPY_BYTES_PER_S = 55e9
"""What PCIe 5.0 x16 brings of page-locked memory."""
GIB = 1 << 30


def bench_checkpoints(
    backend: Backend, workload: Workload, directory: Path, *,
    saves: int, steps: int, prepared: bool, alone: bool,
) -> dict[str, Json]:  # fmt: skip
    """Return the figures of so many saves, each with so many steps before it and beside it at least."""
    batches, objective = workload.batches(), Objective(ReinforceLoss())

    def step() -> Json:
        began = time.perf_counter()
        backend.train_step(batches, objective, policy_version=0)
        _wait_for_device()
        return time.perf_counter() - began

    figures: list[Json] = []
    pending = None
    step()  # makes what the first step makes
    beside_locking: list[Json] = []
    began = time.perf_counter()
    if prepared:
        backend.prepare_checkpoints()
        buffers: CopyBuffers = backend._checkpoint_buffers  # type: ignore[attr-defined]  # both have them
        while not all(gathered(buffers.is_locked)):
            beside_locking.append(step())
    locked_s = time.perf_counter() - began
    for number in range(saves):
        before, undisturbed = _memory_gib("VmRSS"), [step() for _ in range(steps)]
        _forget_peak()
        began = time.perf_counter()
        pending = start_checkpoint(backend, directory, number, {}, keep=1, after=pending)
        begin_s = time.perf_counter() - began
        beside: list[Json] = []
        while len(beside) < steps or not all(gathered(pending.written)):
            beside.append(step())
        written = time.perf_counter()
        pending.finish()
        figures.append({
            "undisturbed_step_s": undisturbed, "begin_s": begin_s, "step_s": beside,
            "parts_s": {**pending.seconds},
            "written_s": written - began, "finish_s": time.perf_counter() - written,
            "memory_before_gib": before, "peak_memory_gib": _memory_gib("VmHWM"),
            "memory_after_gib": _memory_gib("VmRSS"),
        })  # fmt: skip
        sizes = [_size_bytes(directory, rank) for rank in range(dist.get_world_size())]
        if dist.get_rank() == 0:
            sys.stderr.write(json.dumps(figures[-1]) + "\n")
            saved = checkpoints.latest(directory)
            if alone and saved is not None:
                shutil.rmtree(saved)
        dist.barrier()
    return {
        "size_bytes": [*sizes], "copy_limit_s": max(sizes) / COPY_BYTES_PER_S, "locked_s": locked_s,
        "locking_step_s": beside_locking, "saves": figures,
    }  # fmt: skip


def _size_bytes(directory: Path, rank: int) -> int:
    saved = checkpoints.latest(directory)
    return 0 if saved is None else sum(file.stat().st_size for file in saved.glob(f"__{rank}_*"))


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _forget_peak() -> None:
    """Let `VmHWM` begin anew with what the process has now."""
    Path("/proc/self/clear_refs").write_text("5")


def _memory_gib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024 / GIB


def main() -> None:
    """Print the figures of rank 0 as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--backend", choices=sorted(BACKENDS), default="megatron")
    parser.add_argument("--matrices", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--state-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a step on each rank")
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="steps before and beside each save, at least")
    parser.add_argument("--directory", type=Path, help="where checkpoints go; default: a temporary one")
    parser.add_argument("--alone", action="store_true", help="remove each save before the next begins")
    parser.add_argument("--unprepared", action="store_true", help="lock memory at the first save")
    given = parser.parse_args()
    configure_logging("warning")  # the JSON stands alone
    init_world(backend=given.backend)
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    workload = Workload(shape(given.model), dtype, min(2048, given.tokens), given.tokens, 1, rounds=0)
    optimizer = OptimizerConfig(lr=1e-6, matrices=given.matrices, state_dtype=given.state_dtype)
    backend = trainer_of(workload, ParallelConfig(), given.backend, optimizer=optimizer)
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as scratch:
        directory = given.directory or Path(scratch)
        with few_collections():  # as in a learner
            figures = bench_checkpoints(
                backend, workload, directory,
                saves=given.saves, steps=given.steps, prepared=not given.unprepared, alone=given.alone,
            )  # fmt: skip
    if dist.get_rank() == 0:
        settings: dict[str, Json] = {name: str(value) for name, value in vars(given).items()}
        sys.stdout.write(json.dumps({"settings": settings, **figures}) + "\n")
    close_world()


if __name__ == "__main__":
    main()
