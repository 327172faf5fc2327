"""AdamW whose moments are kept in bfloat16: half the memory of the state."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import AdamW, adamw

MOMENTS = ("exp_avg", "exp_avg_sq")


class BFloat16StateAdamW(AdamW):
    """Torch's AdamW (arXiv:1711.05101) with its moments rounded to bfloat16 after each update.

    Like there, `grad_scale` and `found_inf` are attributes that the next update reads.

    The update itself is computed in float32, one parameter after another, so that the float32 moments of
    only one are alive."""

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state. Torch's method would widen the moments to the dtype of the parameters: no room."""
        saved = state_dict["state"]
        rest = {
            number: {name: value for name, value in values.items() if name not in MOMENTS}
            for number, values in saved.items()
        }
        super().load_state_dict({**state_dict, "state": rest})
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        for number, parameter in zip(numbers, parameters, strict=True):
            for name in MOMENTS:
                self.state[parameter][name] = saved[number][name].to(parameter.device, torch.bfloat16)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise NotImplementedError("the loss is computed before the update")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        moments = [state[name].float() for name in MOMENTS]
        fused_update(
            parameter,
            grad,
            moments,
            state["step"],
            group,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
        )
        for name, moment in zip(MOMENTS, moments, strict=True):
            state[name].copy_(moment)


def fused_update(
    parameter: Tensor, grad: Tensor, moments: Sequence[Tensor], step: Tensor, group: dict[str, Any], *,
    grad_scale: Tensor | None, found_inf: Tensor | None,
) -> None:  # fmt: skip
    """Apply torch's fused AdamW to one parameter, its two moments and its count of steps, in place."""
    beta1, beta2 = group["betas"]
    adamw(
        [parameter],
        [grad],
        [moments[0]],
        [moments[1]],
        [],
        [step],
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )
