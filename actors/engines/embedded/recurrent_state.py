"""States of layers that take one from token to token: linear attention, and short convolutions."""

from typing import TYPE_CHECKING

from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

if TYPE_CHECKING:
    from actors.engines.embedded.kv_cache import Cursor

STATES = ("conv_states", "recurrent_states")
"""What transformers calls them in its own cache."""


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]  # transformers is untyped
    """One layer's states, [slots, ...]; a decode step reads and overwrites those of the first rows."""

    def __init__(self, max_slots: int) -> None:
        super().__init__()
        self._max_slots = max_slots
        self._held: dict[str, Tensor] = {}

    def aim(self, cursor: "Cursor") -> None:
        """Let the next forward see the states of its rows."""
        for name, held in self._held.items():
            getattr(self, name)[0] = held[: len(cursor.rows)]
            getattr(self, f"is_{name}_initialized")[0] = True
        self.has_previous_state[0] = True

    def fill(self, first: int, prefilled: LinearAttentionLayer, sources: Tensor) -> None:
        """Copy row `sources[i]` of prefilled states to slot `first + i`."""
        for name in STATES:
            states = getattr(prefilled, name)[0]
            if states is not None:  # a convolution alone has one of them
                self._reserve(name, states, first + len(sources))
                self._held[name][first : first + len(sources)] = states[sources]

    def move(self, targets: Tensor, sources: Tensor, length: int) -> None:
        """Copy slots onto others. A state has no length."""
        for held in self._held.values():
            held[targets] = held[sources]

    def _reserve(self, name: str, states: Tensor, slots: int) -> None:
        held = self._held.get(name)
        have = 0 if held is None else len(held)
        if slots <= have:
            return
        grown = states.new_zeros(min(max(slots, 2 * have), self._max_slots), *states.shape[1:])
        if held is not None:
            grown[:have] = held
        self._held[name] = grown
