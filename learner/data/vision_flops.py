"""Counts what a vision tower computes of images, by their patches."""

from collections.abc import Iterable

from transformers import PretrainedConfig


def tower_flops(vision: PretrainedConfig, patches: Iterable[float]) -> float:
    """Return the FLOPs of one forward pass of a Qwen3-VL's tower over images of so many patches each.

    It counts the matrix products of the embedding of patches, of the layers, whose patches attend to all of
    their image, and of what projects merged patches into the language model: for its input, and for each of
    its first layers that takes some (DeepStack)."""
    hidden, depth = vision.hidden_size, vision.depth
    embedding = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2 * hidden
    layer = 4 * hidden**2 + 2 * hidden * vision.intermediate_size
    merged = vision.spatial_merge_size**2
    projection = hidden * merged * (hidden * merged + vision.out_hidden_size) / merged  # of a patch
    projections = (1 + len(vision.deepstack_visual_indexes)) * projection
    each = 2.0 * (embedding + depth * layer + projections)
    return float(sum(count * (each + 4.0 * depth * hidden * count) for count in patches))
