"""Divides work of unequal sizes over ranks so that no rank waits long for another."""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil
from typing import Self

from transformers import PretrainedConfig

from bus.images import NO_IMAGES, ImageCount


def balanced(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Divide items among `parts` so that the most expensive part is cheap; return the item numbers of each.

    This is the largest differencing method (Karmarkar and Karp 1982). The two partial divisions whose parts
    differ most are merged, the expensive parts of one with the cheap parts of the other, until one is left.
    Parts may be empty. Equal costs give the same division on every rank."""
    order = count()
    heap = [
        (-cost, next(order), [(cost, [item])] + [(0.0, [])] * (parts - 1)) for item, cost in enumerate(costs)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, _, dear), (_, _, cheap) = heapq.heappop(heap), heapq.heappop(heap)
        merged = [
            (a + b, items + others) for (a, items), (b, others) in zip(dear, reversed(cheap), strict=True)
        ]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], next(order), merged))
    return [sorted(items) for _, items in heap[0][2]] if heap else [[] for _ in range(parts)]


FORWARD_AND_BACKWARD = 3.0
"""FLOPs of an update in units of those of its forward passes: the backward pass takes twice that."""


def forward_flops(config: PretrainedConfig, length: int, images: Iterable[int] = ()) -> float:
    """Return the FLOPs of one forward pass over a sequence; an update takes
    `FORWARD_AND_BACKWARD` times that.

    It counts matrix products (two operations a multiply-add) and causal attention, and understands grouped
    queries, latent attention and mixtures of experts by the names that Hugging Face configurations use.

    Args:
        config: of the model.
        length: tokens of the sequence, those that stand for images included.
        images: for each image that the vision tower passes, the tokens that stand for it."""
    return _flops(config, length, length * (length + 1) / 2) + _images_flops(config, images)


def _images_flops(config: PretrainedConfig, images: Iterable[float]) -> float:
    vision: PretrainedConfig | None = getattr(config, "vision_config", None)
    if vision is None:
        return 0.0
    return tower_flops(vision, (tokens * vision.spatial_merge_size**2 for tokens in images))


def _flops(config: PretrainedConfig, tokens: float, pairs: float) -> float:
    config = config.get_text_config()
    layers = _read(config, "num_hidden_layers")
    linear: int = layers * _attention_parameters(config) + _mlp_parameters(config)
    linear += _read(config, "hidden_size") * _read(config, "vocab_size")
    heads = _read(config, "num_attention_heads")
    return 2.0 * linear * tokens + 2.0 * layers * heads * sum(_widths(config)) * pairs


@dataclass(frozen=True, slots=True)
class GroupWork:
    """Tells what a rank computes of a group, as far as that is known before its trajectories are here. They
    are assumed to be of equal lengths, and to have one beginning in common."""

    samples: int
    length: float
    """Tokens of each trajectory."""
    shared: float = 0.0
    """Tokens of their common beginning."""
    packs: float = 0.0
    """Micro-batches that the group takes up, in each of which the beginning is computed."""
    images: ImageCount = NO_IMAGES
    """Images that its trajectories show; each is assumed to have as many tokens as the others."""
    passes: int = 1
    """Micro-batches that its trajectories take up, in each of which the vision tower passes the images."""

    @classmethod
    def of(
        cls, samples: int, tokens: int, computed: int, budget: int, images: ImageCount = NO_IMAGES
    ) -> Self:
        """Find the work from the group's tokens.

        Args:
            samples: trajectories of the group.
            tokens: of all of them together.
            computed: those of different beginnings; 0 where each trajectory is computed by itself.
            budget: tokens that are computed in a micro-batch.
            images: what they show. Models that see images do not share beginnings."""
        length = tokens / samples
        if not 0 < computed < tokens:
            together = max(1, int(budget // max(1.0, length)))
            return cls(samples, length, images=images, passes=ceil(samples / together))
        if computed < length:  # strands of each have more in common than siblings: turns, or a lone sample's
            return cls(1, computed)
        shared = (tokens - computed) / (samples - 1)
        own = length - shared
        packs = ceil(samples * own / max(budget - shared, own)) if own else 1
        return cls(samples, length, shared, packs)

    @property
    def computed_tokens(self) -> float:
        """Return how many tokens go through the model."""
        return self.samples * (self.length - self.shared) + self.packs * self.shared

    def forward_flops(self, config: PretrainedConfig) -> float:
        """Return the FLOPs of one forward pass over the group."""
        whole, shared = (n * (n + 1) / 2 for n in (self.length, self.shared))
        pairs = self.samples * (whole - shared) + self.packs * shared
        number, tokens = self.images
        images = [tokens / number] * number * self.passes if number else []
        return _flops(config, self.computed_tokens, pairs) + _images_flops(config, images)


def _widths(config: PretrainedConfig) -> tuple[int, int]:
    if _read(config, "kv_lora_rank"):
        width = _read(config, "qk_nope_head_dim") + _read(config, "qk_rope_head_dim")
        return width, _read(config, "v_head_dim")
    size = _read(config, "head_dim") or _read(config, "hidden_size") // _read(config, "num_attention_heads")
    return size, size


def _attention_parameters(config: PretrainedConfig) -> int:
    hidden, heads = _read(config, "hidden_size"), _read(config, "num_attention_heads")
    width, value = _widths(config)
    if not (rank := _read(config, "kv_lora_rank")):
        return 2 * hidden * width * (heads + (_read(config, "num_key_value_heads") or heads))
    plain, rotated = _read(config, "qk_nope_head_dim"), _read(config, "qk_rope_head_dim")
    narrow = _read(config, "q_lora_rank")
    queries = narrow * (hidden + heads * width) if narrow else hidden * heads * width
    keys_and_values = hidden * (rank + rotated) + rank * heads * (plain + value)
    return queries + keys_and_values + heads * value * hidden


def _mlp_parameters(config: PretrainedConfig) -> int:
    """Count the parameters of all MLPs; in a mixture only the experts that one token goes through count."""
    hidden, layers = _read(config, "hidden_size"), _read(config, "num_hidden_layers")
    chosen = _read(config, "num_experts_per_tok")
    dense = 3 * hidden * _read(config, "intermediate_size")
    if not chosen:
        return layers * dense
    width = _read(config, "moe_intermediate_size") or _read(config, "intermediate_size")
    experts = _read(config, "num_experts") or _read(config, "num_local_experts")
    sparse = 3 * hidden * width * (chosen + _read(config, "n_shared_experts")) + hidden * experts
    mixtures = sum(_is_mixture(config, layer) for layer in range(layers))
    return mixtures * sparse + (layers - mixtures) * dense


def _is_mixture(config: PretrainedConfig, layer: int) -> bool:
    if layer in (getattr(config, "mlp_only_layers", None) or ()):
        return False
    if layer < _read(config, "first_k_dense_replace"):
        return False
    return (layer + 1) % (_read(config, "decoder_sparse_step") or 1) == 0


def _read(config: PretrainedConfig, name: str) -> int:
    return int(getattr(config, name, None) or 0)


def tower_flops(vision: PretrainedConfig, patches: Iterable[float]) -> float:
    """Return the FLOPs of one forward pass of a tower over images of so many patches each.

    It counts the matrix products of the embedding of patches, of the layers, and of what projects merged
    patches into the language model: for its input, and for each of its first layers that takes some
    (DeepStack). Patches attend to all of their image; in layers of Qwen2.5-VL that have windows to those of
    their window, which are taken for whole ones."""
    hidden, depth = vision.hidden_size, vision.depth
    embedding = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2 * hidden
    whole = getattr(vision, "fullatt_block_indexes", None)  # None: all, and their MLPs have no gate
    mlp = (2 if whole is None else 3) * hidden * vision.intermediate_size
    merged = vision.spatial_merge_size**2
    projection = hidden * merged * (hidden * merged + vision.out_hidden_size) / merged  # of a patch
    projections = (1 + len(getattr(vision, "deepstack_visual_indexes", ()))) * projection
    each = 2.0 * (embedding + depth * (4 * hidden**2 + mlp) + projections)
    windowed = 0 if whole is None else depth - len(whole)
    window = _window_patches(vision) if windowed else 0

    def pairs(count: float) -> float:
        return float((depth - windowed) * count**2 + windowed * count * min(count, window))

    return float(sum(count * each + 4.0 * hidden * pairs(count) for count in patches))


def _window_patches(vision: PretrainedConfig) -> int:
    side = vision.window_size // (vision.patch_size * vision.spatial_merge_size) * vision.spatial_merge_size
    return int(side**2)
