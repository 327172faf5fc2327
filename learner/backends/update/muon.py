"""Muon for the matrices of layers, and AdamW for all other weights.

Muon (Jordan, https://kellerjordan.github.io/posts/muon/, 2024) moves a matrix by its momentum, whose singular
values have been made almost equal. Liu et al. (arXiv:2502.16982, section 2.2) scale the step so that its root
mean square is that of AdamW's, which lets both share a learning rate and a weight decay."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import AdamW

from bus.errors import ConfigError
from learner.backends.update.matrix_exchange import MatrixExchange, Piece

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x^3 and x^5, for which few iterations bring singular values near 1, from 0.7 to 1.2."""
ITERATIONS = 5
EPS = 1e-7
"""Least norm that a matrix is divided by; one of zeros stays so."""
RMS = 0.2
"""Root mean square of AdamW's usual step, over its learning rate."""
MOMENTUM = "exp_avg"
"""Name of the momentum in the state: it lies where AdamW has its first moment."""
SECOND = "exp_avg_sq"
"""Name of AdamW's second moment, which the parts of matrices lack."""


def muon_steps(momenta: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what the learning rate multiplies, float32 [n, rows, columns]: 0.2 sqrt(max(rows, columns)) O.

    O has the singular vectors of the momentum, and singular values near 1, by Newton and Schulz's iteration.

    Args:
        momenta: float32 [n, rows, columns], n matrices of one shape.
        dtype: of the iteration."""
    rows, columns = momenta.shape[1:]
    x = momenta / torch.linalg.matrix_norm(momenta, keepdim=True).clamp(min=EPS)
    x = (x.mT if rows > columns else x).to(dtype)
    linear, cubic, quintic = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=cubic, alpha=quintic), x, beta=linear)
    steps: Tensor = (x.mT if rows > columns else x).float() * (RMS * math.sqrt(max(rows, columns)))
    return steps


class MuonAdamW(AdamW):
    """Torch's AdamW, beside which Muon updates those parameters that are parts of matrices.

    Like AdamW's, its update reads the attributes `grad_scale` and `found_inf`, and the host waits for
    nothing."""

    grad_scale: Tensor
    found_inf: Tensor
    exchange: MatrixExchange
    """Has the matrices put together."""
    parts: dict[str, Tensor]
    """Parameters that Muon updates, of which some may be empty, by the names of their tensors."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters; `closure` is not supported. Every rank that has parts calls this."""
        if closure is not None:
            raise NotImplementedError("the loss is computed before the update")
        gradients = {name: part.grad for name, part in self.parts.items()}
        for part in self.parts.values():
            part.grad = None  # so that AdamW leaves it alone
        super().step()
        groups = {part: group for group in self.param_groups for part in group["params"]}
        skip = self.found_inf > 0

        def direction(name: str) -> Tensor:
            part = self.parts[name]
            return self._direction(part, gradients[name], groups[part], skip)

        for name, step in self.exchange.steps(direction):
            part = self.parts[name]
            group = groups[part]
            moved = part * (1 - group["lr"] * group["weight_decay"])
            moved.add_(step.view_as(part), alpha=-group["lr"])
            part.copy_(torch.where(skip, part, moved))

    def _direction(
        self, part: Tensor, gradient: Tensor | None, group: dict[str, Any], skip: Tensor
    ) -> Tensor:
        """Add the gradient to the momentum, and return the momentum that the next gradient would find."""
        state = self.state[part]
        # A matrix that no token of any rank reached has no gradient, and is moved by its momentum.
        mean = torch.zeros_like(part) if gradient is None else gradient / self.grad_scale
        momentum = torch.add(mean, state[MOMENTUM], alpha=group["momentum"])
        state[MOMENTUM].copy_(torch.where(skip, state[MOMENTUM], momentum))
        state["step"] += 1 - self.found_inf
        return mean.add_(momentum, alpha=group["momentum"])


def begin_with_zeros(optimizer: MuonAdamW) -> None:
    """Make the state that the first update finds."""
    muons = set(optimizer.parts.values())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            moments = [MOMENTUM] if parameter in muons else [MOMENTUM, SECOND]
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                **{moment: torch.zeros_like(parameter) for moment in moments},
            }


def refuse_none_trained(pieces: Sequence[Piece]) -> None:
    """Raise `ConfigError` where the ranks train no piece of a matrix."""
    if not pieces:
        raise ConfigError(
            "optimizer.matrices=muon has no matrix of a layer to train: set it to adamw, or train other "
            "weights"
        )


def refuse_other_optimizer(directory: Path, saved: str, ours: str, section: str = "optimizer") -> None:
    """Raise `ConfigError` where the state in a checkpoint is that of another optimizer than the run's."""
    if saved != ours:
        raise ConfigError(
            f"checkpoint {directory} was trained with {section}.matrices={saved}, whose state does not fit "
            f"that of {ours}: set it again, or start a new run from its weights with --model.path"
        )
