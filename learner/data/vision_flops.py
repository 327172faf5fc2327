"""Counts what a vision tower computes of images, by their patches."""

from collections.abc import Iterable

from transformers import PretrainedConfig


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
        """Return how many pairs of patches attend in all layers."""
        return float((depth - windowed) * count**2 + windowed * count * min(count, window))

    return float(sum(count * each + 4.0 * hidden * pairs(count) for count in patches))


def _window_patches(vision: PretrainedConfig) -> int:
    side = vision.window_size // (vision.patch_size * vision.spatial_merge_size) * vision.spatial_merge_size
    return int(side**2)
