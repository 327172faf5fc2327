"""The learner's world of processes and megatron-core's process groups in it."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from learner.megatron import parallel_state

INIT_TIMEOUT = timedelta(minutes=5)
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class ParallelSizes:
    """How the world is divided; what is left over is data parallel."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1


def device() -> torch.device:
    """Return where this process computes: its own GPU where CUDA exists, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def init_world(sizes: ParallelSizes = ParallelSizes()) -> None:
    """Join the world that torchrun describes in the environment, or be a world of one.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. NCCL where CUDA exists, else gloo.
    """
    backend, device_id = "gloo", None
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend, device_id = "nccl", device()
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=INIT_TIMEOUT, device_id=device_id)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # torch exports it, its stubs do not
        dist.init_process_group(
            backend, store=store, rank=0, world_size=1, timeout=INIT_TIMEOUT, device_id=device_id
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        distributed_timeout_minutes=int(COLLECTIVE_TIMEOUT.total_seconds() // 60),
    )


def close_world() -> None:
    """Leave the world; `init_world` may be called again."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def data_parallel_sum(values: torch.Tensor) -> torch.Tensor:
    """Add `values` over the data-parallel ranks, in place."""
    dist.all_reduce(values, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return values
