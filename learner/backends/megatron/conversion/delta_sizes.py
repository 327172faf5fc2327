from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DeltaSizes:
    """Sizes of gated delta nets, which are linear attention (arXiv:2412.06464), and the layers that are one.

    Heads of keys are counted as those of queries, and each is that of as many consecutive heads of values."""

    layers: tuple[bool, ...]
    """Says which layers are delta nets; the others have attention."""
    key_heads: int
    value_heads: int
    key_width: int
    """Width of a head of queries, and of one of keys."""
    value_width: int
    taps: int
    """Tokens that the convolution before the delta rule sees, its own the last of them."""

    @property
    def values_of_key_head(self) -> int:
        """Return how many heads of values share a head of keys."""
        return self.value_heads // self.key_heads
