"""Small pictures and a tiny vision-language model directory."""

import base64
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from learner.config.model import ScratchModel, ScratchVision
from learner.scratch_model import build_model_directory

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
