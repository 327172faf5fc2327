"""The optimizer over this rank's shards of the parameters, which the device updates, or skips, by itself."""

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from learner.backends.fsdp.matrices import FileMatrices
from learner.backends.fsdp.weights import first_row, local
from learner.backends.shared import multi_tensor
from learner.backends.update.bf16_adamw import MOMENTS, BFloat16StateAdamW
from learner.backends.update.decision import Decision
from learner.backends.update.matrix_exchange import MatrixExchange, Piece
from learner.backends.update.muon import MuonAdamW, begin_with_zeros, muon_steps, refuse_none_trained
from learner.config.optimizer import OptimizerConfig
from learner.distributed.process_group import device, gathered


class ShardedOptimizer:
    """AdamW (arXiv:1711.05101), or Muon beside it, on plain tensors that share the `DTensor`s' memory."""

    def __init__(
        self, config: OptimizerConfig, parameters: Mapping[str, DTensor],
        matrices: Mapping[str, FileMatrices], dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """Begin with moments of 0 for those of `parameters` that are trained. Every rank calls this.

        Muon updates those of `matrices`, which it computes with in `dtype`. Raises `ConfigError` where it has
        none to update."""
        self._trained = {name: each for name, each in parameters.items() if each.requires_grad}
        self._shards = {name: torch.nn.Parameter(local(each)) for name, each in self._trained.items()}
        decayed: list[Tensor] = []
        exempt: list[Tensor] = []
        for name, parameter in self._trained.items():
            is_exempt = parameter.ndim == 1 or name.endswith("bias")
            (exempt if is_exempt else decayed).append(self._shards[name])
        groups = [{"params": decayed, "decays": True}, {"params": exempt, "decays": False}]
        kind = {"float32": torch.optim.AdamW, "bfloat16": BFloat16StateAdamW}[config.state_dtype]
        if config.matrices == "muon":
            kind = MuonAdamW
        self._adamw = kind([group for group in groups if group["params"]], lr=config.lr, fused=True)
        if isinstance(self._adamw, MuonAdamW):
            self._add_muon(self._adamw, matrices, dtype)
            return
        moment_dtype = torch.bfloat16 if config.state_dtype == "bfloat16" else None
        for part in self._shards.values():
            self._adamw.state[part] = {
                "step": torch.zeros((), dtype=torch.float32, device=part.device),
                **{moment: torch.zeros_like(part, dtype=moment_dtype) for moment in MOMENTS},
            }

    def _add_muon(
        self, optimizer: MuonAdamW, matrices: Mapping[str, FileMatrices], dtype: torch.dtype
    ) -> None:
        # A rank whose shard is empty has no piece, and state of the same names as the others.
        optimizer.parts = {name: part for name, part in self._shards.items() if name in matrices}
        mine = []
        for name, part in optimizer.parts.items():
            if part.numel():
                start = first_row(self._trained[name]) * part[0].numel()
                mine.append(Piece(name, dist.get_rank(), 0, start, start + part.numel()))
        pieces = [piece for of_rank in gathered(mine) for piece in of_rank]
        refuse_none_trained(pieces)
        optimizer.exchange = MatrixExchange(pieces, matrices, partial(muon_steps, dtype=dtype))
        begin_with_zeros(optimizer)

    @property
    def parts(self) -> dict[str, Tensor]:
        """Return this rank's parts of the trained parameters, which share their memory."""
        return {name: part.data for name, part in self._shards.items()}

    def clear_gradients(self) -> None:
        for name, parameter in self._trained.items():
            parameter.grad = self._shards[name].grad = None

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """Return the norm of the summed gradient, float32 [] on the device. Every rank calls this."""
        square = torch.zeros((), dtype=torch.float32, device=device())
        for name, parameter in self._trained.items():
            if parameter.grad is not None:
                self._shards[name].grad = local(parameter.grad)
        gradients = [part.grad for part in self._shards.values() if part.grad is not None and part.numel()]
        if gradients:
            square += multi_tensor.norm(gradients).square().to(square.device)
        dist.all_reduce(square)  # each rank has the squares of its own shards
        return square.sqrt()

    @torch.no_grad()
    def update(self, config: OptimizerConfig, lr: float, decision: Decision) -> None:
        """Update the parameters as `decision` says; `gradient_norm` was called before."""
        for group in self._adamw.param_groups:
            group["lr"], group["betas"], group["eps"] = lr, (config.beta1, config.beta2), config.eps
            group["weight_decay"] = config.weight_decay if group["decays"] else 0.0
            group["momentum"] = config.momentum
        place = next(iter(self._shards.values())).device
        # read by torch, as from its GradScaler
        self._adamw.grad_scale = decision.divisor.to(place)  # type: ignore[attr-defined]
        self._adamw.found_inf = decision.skip.to(place)  # type: ignore[attr-defined]
        self._adamw.step()

    def moments(self) -> dict[str, tuple[DTensor, Tensor]]:
        """Return for each moment, as `exp_avg.NAME`, the parameter it belongs to and this rank's part."""
        return {
            f"{moment}.{name}": (self._trained[name], self._adamw.state[part][moment])
            for name, part in self._shards.items()
            for moment in MOMENTS
            if moment in self._adamw.state[part]
        }

    def restore_steps(self, updates: int) -> None:
        """Go on after so many updates; the moments are those of then."""
        for part in self._shards.values():
            self._adamw.state[part]["step"].fill_(updates)
