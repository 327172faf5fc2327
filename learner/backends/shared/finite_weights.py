"""Refuses weights that are not finite: no update of them would be, and the learner skips such updates."""

from collections.abc import Iterable

import torch
from torch import Tensor

from bus.errors import ConfigError
from storage.model_files.model_reading import AGAIN

CHECKED_ON = "cuda"
"""Kind of device whose weights are looked at: a CPU would take a third of the time of their load for it."""


def refuse_not_finite(weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise `ConfigError` for weights that hold NaN or infinity, by one reduction of each on their device."""
    here = [
        (name, each.detach()) for name, each in weights if each.device.type == CHECKED_ON and each.numel()
    ]
    extremes = [torch.aminmax(each) for _, each in here]
    sums = [(least + largest).float() for least, largest in extremes]
    finite = torch.stack(sums).isfinite().tolist() if sums else []
    if broken := [name for (name, _), is_finite in zip(here, finite, strict=True) if not is_finite]:
        raise ConfigError(f"{len(broken)} weights hold NaN or infinity, such as {broken[0]}: {AGAIN}")
