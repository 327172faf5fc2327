"""The vision tower of a scratch model, and the image processor of its directory."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerFast, Qwen3VLConfig

from learner.config.model import ScratchVision

if TYPE_CHECKING:  # it loads transformers' models, which takes a second
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

VISION_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
MERGE = 2
"""Patches in a row, and in a column, that become one token."""
GRID = 16
"""Rows of learned positions, which are interpolated to those of an image."""


def vision_config(
    sizes: ScratchVision, text: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast
) -> Qwen3VLConfig:
    """Return the configuration of a Qwen3-VL whose language model has the hyperparameters `text`."""
    half = text["head_dim"] // 2
    side = 5 * half // 16  # as published models divide a head: 24, 20 and 20 of 64
    start, image, end, video = tokenizer.convert_tokens_to_ids(list(VISION_TOKENS))
    return Qwen3VLConfig(
        architectures=["Qwen3VLForConditionalGeneration"],
        text_config={
            **text,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10_000.0, "mrope_interleaved": True,
                "mrope_section": [half - 2 * side, side, side],
            },
        },
        vision_config={
            "depth": sizes.layers,
            "hidden_size": sizes.hidden_size,
            "num_heads": sizes.heads,
            "intermediate_size": sizes.intermediate_size,
            "patch_size": sizes.patch_size,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "out_hidden_size": text["hidden_size"],
            "num_position_embeddings": GRID**2,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=text["tie_word_embeddings"],
    )  # fmt: skip


def image_processor(sizes: ScratchVision) -> "Qwen2VLImageProcessorPil":
    """Return what makes patches of images."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    token = (MERGE * sizes.patch_size) ** 2
    return Qwen2VLImageProcessorPil(
        patch_size=sizes.patch_size,
        merge_size=MERGE,
        temporal_patch_size=2,
        size={"shortest_edge": token, "longest_edge": max(token, sizes.largest_pixels)},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
