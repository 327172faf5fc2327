"""Masks of a decode step: which of the keys in the cache the newest token of each row sees.

The cache keeps all keys of a row, also those that are behind a sliding window."""

from typing import Any

import torch
from torch import Tensor

from actors.engines.embedded.kv_cache import FULL_ATTENTION

SLIDING = "sliding_attention"


class DecodeMasks:
    """Makes masks as the layers of a model want them."""

    def __init__(self, config: Any) -> None:
        kinds = getattr(config, "layer_types", None)
        self._by_kind = kinds is not None and SLIDING in kinds
        """Says that transformers takes one mask for each kind of layers."""
        window = getattr(config, "sliding_window", None)
        self._window: int | None = window if kinds is None or self._by_kind else None

    @property
    def have_windows(self) -> bool:
        """Return whether some layers see a window alone."""
        return self._window is not None

    def of(self, positions: Tensor, width: int, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """Return what is added to scores, [n, 1, 1, width], by the kind of layers if the model has several.

        Args:
            positions: int64 [n], position of each row's token.
            width: number of positions in the cache.
            dtype: the model's."""
        back = positions[:, None] - torch.arange(width, device=positions.device)
        if not self._by_kind:
            return _added(_seen(back, self._window), dtype)
        return {
            FULL_ATTENTION: _added(_seen(back, None), dtype),
            SLIDING: _added(_seen(back, self._window), dtype),
        }


def _seen(back: Tensor, window: int | None) -> Tensor:
    """Tell which keys are seen that lie so many positions back, bool [n, width]."""
    return back >= 0 if window is None else (back >= 0) & (back < window)


def _added(seen: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, float("-inf"))[:, None, None]
