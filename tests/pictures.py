"""Small pictures and a tiny vision-language model directory."""

import base64
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from learner.config.model import ScratchModel, ScratchVision
from learner.initial.scratch_model import TEXT_SIZES, build_model_directory
from learner.model_directories.model_directory import load_hf_config

SIZES = ScratchModel(
    hidden_size=64, layers=3, heads=4, kv_heads=2, intermediate_size=96, context=128,
    vision=ScratchVision(layers=2, hidden_size=32, heads=2, intermediate_size=48),
)  # fmt: skip


def picture(height: int = 16, width: int = 24, *, seed: int = 0, kind: str = "PNG") -> bytes:
    """The encoded bytes of a picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def data_uri(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes) -> dict:
    return {"type": "image_url", "image_url": {"url": data_uri(data)}}


def vision_directory(directory: Path, *, seed: int = 0, sizes: ScratchModel = SIZES) -> Path:
    """A model directory of a tiny Qwen3-VL."""
    return build_model_directory(directory, sizes, seed=seed)


def older_vision_directory(directory: Path, *, seed: int = 0) -> Path:
    """A model directory of a tiny Qwen2.5-VL: windows of two tokens a side in one layer of its tower, all of
    the image in the other."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    alike = load_hf_config(vision_directory(directory, seed=seed))
    (directory / "model.safetensors").unlink()
    text = {name: getattr(alike.text_config, name) for name in (*TEXT_SIZES, "vocab_size", "pad_token_id")}
    tokens = {name: value for name, value in alike.to_dict().items() if name.endswith("_token_id")}
    config = Qwen2_5_VLConfig(
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        text_config=text | {
            "bos_token_id": None, "eos_token_id": alike.text_config.eos_token_id, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "patch_size": 4,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64, "window_size": 16,
            "fullatt_block_indexes": [1], "tokens_per_second": 2,
        },
        tie_word_embeddings=True, **tokens,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2_5_VLForConditionalGeneration(config).save_pretrained(directory)
    return directory


TINY = {"qwen3_vl": vision_directory, "qwen2_5_vl": older_vision_directory}
"""What makes a tiny model of each family."""
