"""How much of a GPU a step used."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from learner.metrics.gpus import own_gpu

GIB = 1 << 30


def utilisation(seconds: Mapping[str, float], flops: float) -> dict[str, float]:
    """Return the share of the GPUs' peak that a step's updates reached, and this rank's memory since the last
    call; nothing on a CPU. It asks the device of the thread. `flops` are of the passes of `update_s`, over
    all ranks."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    found = {
        "memory/gpu_peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "memory/gpu_reserved_gib": torch.cuda.max_memory_reserved() / GIB,
    }
    torch.cuda.reset_peak_memory_stats()
    gpu = own_gpu()
    update_s = seconds.get("update_s", 0.0)
    if gpu is not None and update_s:
        found["train/mfu"] = flops / (update_s * dist.get_world_size() * gpu.peak_flops)
    return found
