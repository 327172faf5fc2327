"""What GPUs can do, by their makers' data sheets."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU."""

    name: str
    memory_gib: float
    peak_flops: float
    """Dense bfloat16."""
    bytes_per_s: float
    """Bandwidth of its memory."""
    context_gib: float
    """Memory that a learner's process takes outside torch's allocator: 7.7 and 7.8 GiB of an H200, with an 8B
    and a 0.6B. An H100 has the same chip; nobody measured the others, which are taken to lose the same share
    of their memory."""


GPUS = {
    "h200": Gpu("h200", 139.8, 989e12, 4.8e12, 7.8),
    "h100": Gpu("h100", 79.6, 989e12, 3.35e12, 7.8),
    "a100": Gpu("a100", 79.3, 312e12, 2.04e12, 4.4),
    "b200": Gpu("b200", 178.4, 2250e12, 8.0e12, 10.0),
    "l40s": Gpu("l40s", 44.5, 362e12, 0.86e12, 2.5),
}
"""GPUs by name."""


def gpu_named(device_name: str) -> Gpu | None:
    """Return the kind of a GPU by the name that CUDA gives it, such as NVIDIA H200; None if unknown."""
    words = device_name.lower().replace("-", " ").split()
    return next((gpu for name, gpu in GPUS.items() if name in words), None)


def own_gpu() -> Gpu | None:
    """Return the kind of this process's GPU; None without one, or if it is unknown."""
    import torch  # other callers name a GPU without it

    return gpu_named(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
