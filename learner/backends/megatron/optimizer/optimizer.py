"""megatron-core's distributed AdamW, with the faults of its torch fallback repaired.

Its way to save gathers the whole state on the host of every rank, and takes parameters behind padding for
parts of one another: `save_own_shards` (saved_shards.py).

Without Transformer Engine and Apex, megatron-core 0.16.1 wraps `torch.optim.AdamW`, and then
- its state dict asserts that every parameter has been stepped: `_prime` makes a fresh state look so;
- saving asserts that there is a parameter at all, which the experts' part has none of on a stage of a
  pipeline whose layers are dense: `_count_as_others` lends it the count of the others;
- loading raises KeyError 'step', which checkpoints hold once and not per parameter: `_keep_step_on_load`;
- a state in lower precision needs Transformer Engine: `BFloat16StateAdamW` does without;
- loading gives all parameters one shared `step` tensor, so that each update would count many times and the
  trajectory silently departs from an uninterrupted run: `load_optimizer_state` separates them."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from bus.errors import ConfigError
from bus.process.process_tuning import collect_older
from learner.backends.megatron.core.megatron_core import (
    DistributedDataParallel,
    DistributedOptimizer,
    MegatronOptimizer,
    MegatronOptimizerConfig,
    get_megatron_optimizer,
)
from learner.backends.megatron.optimizer.muon import add_muon
from learner.backends.megatron.optimizer.offload import OffloadedAdamW, offload
from learner.backends.megatron.optimizer.saved_shards import save_own_shards
from learner.backends.shared import multi_tensor
from learner.backends.update.bf16_adamw import MOMENTS, BFloat16StateAdamW
from learner.config.optimizer import OptimizerConfig
from learner.distributed.process_group import device, gathered


@torch.no_grad()  # shards are views of the parameters that must stay leaves
def build_optimizer(
    config: OptimizerConfig, chunks: Sequence[DistributedDataParallel], hf_config: PretrainedConfig,
    dtype: torch.dtype,
) -> MegatronOptimizer:  # fmt: skip
    """Build an optimizer with fresh state over the parameters of `chunks`, distributed if they are.

    They are a model of `hf_config`, or a critic beside one. Raises `ConfigError` for an optimizer that could
    not be resumed. Every rank calls this."""
    if not chunks[0].ddp_config.use_distributed_optimizer:
        _refuse_experts_of_some_ranks(chunks)
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            clip_grad=config.clip_grad,
            use_distributed_optimizer=chunks[0].ddp_config.use_distributed_optimizer,
            overlap_param_gather=chunks[0].ddp_config.overlap_param_gather,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
        ),
        list(chunks),
    )
    for part in optimizer.chained_optimizers:
        if isinstance(part, DistributedOptimizer):
            _keep_step_on_load(part)
            save_own_shards(part)
        if config.offload:
            if not isinstance(part, DistributedOptimizer):
                raise ConfigError(
                    f"optimizer.offload={config.offload} needs parallel.distributed_optimizer=true"
                )
            offload(part, config.offload, config.offload_directory)
        if config.state_dtype == "bfloat16":
            part.optimizer.__class__ = BFloat16StateAdamW
        if config.matrices == "adamw":
            _prime(part.optimizer)
    if config.matrices == "muon":
        add_muon(optimizer, [chunk.module for chunk in chunks], hf_config, dtype)
    _count_as_others(optimizer)
    return optimizer


def configure_optimizer(optimizer: MegatronOptimizer, config: OptimizerConfig, lr: float) -> None:
    """Set what the next update uses, whatever a loaded checkpoint brought along."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["betas"] = (config.beta1, config.beta2)
        group["eps"] = config.eps
        group["momentum"] = config.momentum
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
        group["fused"] = True  # one kernel, on CPU too


@torch.no_grad()
def gradient_norm(optimizer: MegatronOptimizer) -> Tensor:
    """Return the global norm of the summed gradient, float32 [] on the device, and prepare it for `update`.
    Megatron-core's own function returns a number, for which the host waits until the device is done."""
    optimizer.prepare_grads()
    gradients: dict[dist.ProcessGroup, list[Tensor]] = {}
    for part in optimizer.chained_optimizers:
        group = part.get_grad_stats_parallel_group()
        gradients.setdefault(group, []).extend(part.get_main_grads_for_grad_norm())
    total = torch.zeros((), dtype=torch.float32, device=device())
    for group, tensors in gradients.items():
        square = multi_tensor.norm(tensors).square() if tensors else torch.zeros_like(total)
        dist.all_reduce(square, group=group)  # each rank has the squares of its own share of the gradient
        total += square
    return total.sqrt()


@torch.no_grad()
def update(optimizer: MegatronOptimizer, *, divisor: Tensor, skip: Tensor) -> None:
    """Update the parameters with the gradient over `divisor`, or leave everything as it is.

    The host does not wait for the device.

    Args:
        optimizer: `gradient_norm` was called before.
        divisor: float32 [], on the device; the gradient itself is divided as well.
        skip: float32 [], 1 to leave weights, moments and step counts as they are, else 0."""
    for part in optimizer.chained_optimizers:  # read by torch, as from its GradScaler
        part.optimizer.grad_scale, part.optimizer.found_inf = divisor, skip
    optimizer.step_with_ready_grads()


@torch.no_grad()
def load_optimizer_state(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Load what `optimizer.sharded_state_dict` saved."""
    optimizer.load_state_dict(state)
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, OffloadedAdamW):
            part.optimizer.settle_state()
        for values in part.optimizer.state.values():
            values["step"] = values["step"].to(values["exp_avg"].device, copy=True)


def give_up_optimizer(trained: object) -> None:
    """Free the memory of the attribute `optimizer` of what is trained, before there is another one.

    Megatron-core's optimizers refer to themselves, so that they would stay until a collection."""
    last: MegatronOptimizer | None = trained.__dict__.pop("optimizer", None)
    if last is None:
        return
    _give_up_offloaded(last)
    del last
    collect_older()


def _give_up_offloaded(optimizer: MegatronOptimizer) -> None:
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, OffloadedAdamW):
            part.optimizer.give_up()


def _refuse_experts_of_some_ranks(chunks: Sequence[DistributedDataParallel]) -> None:
    """Raise `ConfigError` on every rank when some train experts, for which megatron-core has a second
    optimizer, and others do not: saving takes no notice, and loading finds the second where there is none."""
    trains = any(
        parameter.requires_grad and not getattr(parameter, "allreduce", True)  # the mark of experts
        for chunk in chunks
        for parameter in chunk.parameters()
    )
    without = [rank for rank, has in enumerate(gathered(trains)) if not has]
    if 0 < len(without) < dist.get_world_size():
        raise ConfigError(
            f"learner.parallel.distributed_optimizer=false, where rank {', '.join(map(str, without))} of the "
            "learner trains no experts and others do: megatron-core cannot resume its optimizer, set "
            "distributed_optimizer=true"
        )


def _prime(optimizer: torch.optim.Optimizer) -> None:
    """Make the state that the first update would make, in its dtype: a wider one may not fit."""
    dtype = torch.bfloat16 if isinstance(optimizer, BFloat16StateAdamW) else None
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]  # has moments already where a file does
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in MOMENTS:
                if name not in state:
                    state[name] = torch.zeros_like(parameter, dtype=dtype)


def _count_as_others(optimizer: MegatronOptimizer) -> None:
    """Have parts without parameters save the step of one that has some: all count alike.

    Megatron-core then prints at each save that the common state dicts of ranks differ by 'param_state', which
    is empty for such a part and sharded for others. It compares only; each rank loads what it asks for."""
    parts = optimizer.chained_optimizers
    stepped = next((part.optimizer for part in parts if part.optimizer.state), None)

    def lend(_: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        assert stepped is not None  # a rank without anything to train is refused
        first = next(iter(stepped.state.values()))  # read here: loading a checkpoint replaces the state
        return {**saved, "state": {0: {"step": first["step"]}}}

    for part in parts:
        if isinstance(part, DistributedOptimizer) and not part.optimizer.state:
            part.optimizer.register_state_dict_post_hook(lend)


def _keep_step_on_load(optimizer: DistributedOptimizer) -> None:
    assign = optimizer._set_main_param_and_optimizer_states

    def assign_with_step(model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        current = optimizer._get_main_param_and_optimizer_states(model_param)
        assign(model_param, {"step": current["step"], **tensors})

    optimizer._set_main_param_and_optimizer_states = assign_with_step
