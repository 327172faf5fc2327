"""Tells which backends there are, and which settings FSDP does not have. Loads without torch."""

from typing import Literal

from learner.config.lora import LoraConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig, refuse_world

BackendName = Literal["megatron", "fsdp"]
SIZES = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
"""Settings of `learner.parallel` by which ranks share a model otherwise than FSDP does."""


def refuse_unsupported(
    parallel: ParallelConfig, optimizer: OptimizerConfig, lora: LoraConfig, *, has_critic: bool,
    share_prefixes: bool,
) -> None:  # fmt: skip
    """Raise `ValueError` with all settings that `learner.backend=fsdp` does not have."""
    problems = [
        f"learner.parallel.{name}={size}: each of its ranks is data parallel; leave it at 1"
        for name in SIZES
        if (size := getattr(parallel, name)) > 1
    ]
    if not parallel.distributed_optimizer:
        problems.append("learner.parallel.distributed_optimizer=false: its ranks always share the optimizer")
    problems += [
        f"learner.parallel.{name}=true: its communication always overlaps; leave it out"
        for name in ("overlap_grad_reduce", "overlap_param_gather")
        if getattr(parallel, name)
    ]
    if parallel.recompute == "selective":
        problems.append("learner.parallel.recompute=selective: set it to full or none")
    if 0 < optimizer.offload < 1:
        problems.append(
            f"learner.optimizer.offload={optimizer.offload}: it offloads weights, gradients and moments "
            "altogether (1) or not at all (0)"
        )
    if optimizer.offload_directory is not None:
        problems.append(
            f"learner.optimizer.offload_directory={optimizer.offload_directory}: it offloads to memory only"
        )
    if has_critic:
        problems.append("a critic: use an advantage without one, and leave learner.critic.train alone")
    if share_prefixes:
        problems.append("learner.batch.share_prefixes=true: set it to false")
    if lora.weight_decomposed and lora.experts:
        problems.append(
            "learner.lora.weight_decomposed=true with learner.lora.experts=true: it trains no lengths of "
            "rows of experts; set one of them to false"
        )
    if problems:
        listed = "\n".join(f"- {problem}" for problem in problems)
        raise ValueError(f"learner.backend=fsdp does not have these settings; use megatron, or:\n{listed}")


def refuse_other_world(parallel: ParallelConfig, ranks: int, backend: BackendName) -> None:
    """Raise `ConfigError` for a world of so many ranks that cannot be divided as `parallel` says."""
    if backend == "megatron":  # elsewhere nothing is divided
        refuse_world(parallel, ranks)
