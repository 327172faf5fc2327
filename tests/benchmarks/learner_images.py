"""A vision-language model and sequences that each show an image, for measurements of the learner's steps."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import Qwen3VLConfig

from benchmarks.learner_workloads import Workload
from benchmarks.model_shapes import SHAPES
from bus.codec import Json
from bus.images import shown_tokens
from learner.config.model import ScratchVision
from learner.data.balancing import FORWARD_AND_BACKWARD, forward_flops
from learner.data.packing import MicroBatch, Sample
from learner.initial.scratch_model import MERGE, image_processor
from storage.images.reader import ImageReader

BEFORE_IMAGE = 2
"""Tokens before the image of a sequence."""
VOCABULARY_TAIL = 4
"""Tokens at the end of a vocabulary that stand for images: where one begins, its patches, its end, videos."""


@dataclass(frozen=True, kw_only=True)
class ImageWorkload(Workload):
    """Sequences with an image of noise each, all of them different."""

    model: Qwen3VLConfig
    images: ImageReader
    pixels: tuple[int, int]
    """Height and width of each image."""

    def samples(self) -> list[Sample]:
        """Random trajectories with an image after two tokens, all of whose other tokens are trained."""
        noise = np.random.default_rng(0)
        return [self._showing(sample, noise) for sample in super().samples()]

    def _showing(self, sample: Sample, noise: np.random.Generator) -> Sample:
        file = BytesIO()
        Image.fromarray(noise.integers(0, 256, (*self.pixels, 3), np.uint8)).save(file, "PNG")
        image = self.images.read(file.getvalue()).moved(BEFORE_IMAGE)
        shown = shown_tokens(len(sample.token_ids), (image,))
        start, pad, end = self.images.token_ids
        tokens = np.where(shown, pad, sample.token_ids % (self.vocab_size - VOCABULARY_TAIL))
        tokens[[image.start - 1, image.stop]] = start, end
        return replace(
            sample, token_ids=tokens.astype(np.int32), loss_mask=sample.loss_mask & ~shown, images=(image,)
        )

    def plain_inputs(self, batch: MicroBatch) -> Mapping[str, Tensor]:
        """Return what transformers' own model takes of a micro-batch, whose sequences are of one length."""
        shown = torch.from_numpy(shown_tokens(len(batch.tokens), batch.images)).view(-1, self.sequence)
        tokens = batch.tokens.view(-1, self.sequence)
        patches = np.concatenate([self.images.patches(image) for image in batch.images])
        return {
            "input_ids": tokens,
            "labels": tokens.masked_fill(shown, -100),
            "mm_token_type_ids": shown.long(),
            "pixel_values": torch.from_numpy(patches),
            "image_grid_thw": torch.tensor([self.images.grid(image) for image in batch.images]),
        }

    def flops(self) -> float:
        """Return the FLOPs of one step, forward and backward without recomputation, the tower's included."""
        image = self.samples()[0].images[0]
        of_sequence = forward_flops(self.model, self.sequence, [image.rows * image.columns])
        return FORWARD_AND_BACKWARD * of_sequence * (self.tokens // self.sequence)


def qwen3_vl_600m() -> ImageWorkload:
    """Qwen3-0.6B with a vision tower of 0.1 billion weights on 64k tokens a step, in sequences of 2k with an
    image of 256 tokens each."""
    tower = ScratchVision(
        layers=12, hidden_size=768, heads=12, intermediate_size=3072, patch_size=16, largest_pixels=1 << 20
    )
    text = {
        name: value for name, value in SHAPES["qwen3-0.6b"].items() if name not in ("rope_theta", "dtype")
    }
    config = _config(text, tower, deepstack=(3, 6, 9))
    return ImageWorkload(
        model=config, dtype=torch.bfloat16, sequence=2048, micro_batch=8192, micro_batches=8, rounds=5,
        images=_reader(config, tower), pixels=(512, 512),
    )  # fmt: skip


def small_images() -> ImageWorkload:
    """Return what a laptop trains in a fraction of a second: an image of 32 tokens in sequences of 256."""
    tower = ScratchVision(
        layers=2, hidden_size=128, heads=4, intermediate_size=256, patch_size=8, largest_pixels=1 << 20
    )
    text: dict[str, Json] = {
        "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 4096, "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    }  # fmt: skip
    config = _config(text, tower, deepstack=(0,))
    return ImageWorkload(
        model=config, dtype=torch.float32, sequence=256, micro_batch=2048, micro_batches=2, rounds=7,
        images=_reader(config, tower), pixels=(64, 128),
    )  # fmt: skip


def _config(text: Mapping[str, Json], tower: ScratchVision, *, deepstack: tuple[int, ...]) -> Qwen3VLConfig:
    """Return a model with this language model and tower, whose layers `deepstack` feed its first layers."""
    half, vocab_size = int(str(text["head_dim"])) // 2, int(str(text["vocab_size"]))
    side = 5 * half // 16
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_interleaved": True}
    start, image, end, video = range(vocab_size - VOCABULARY_TAIL, vocab_size)
    return Qwen3VLConfig(
        text_config={
            **text, "use_cache": False,
            "rope_parameters": rope | {"mrope_section": [half - 2 * side, side, side]},
        },
        vision_config={
            "depth": tower.layers, "hidden_size": tower.hidden_size, "num_heads": tower.heads,
            "intermediate_size": tower.intermediate_size, "patch_size": tower.patch_size,
            "spatial_merge_size": MERGE, "temporal_patch_size": 2, "out_hidden_size": text["hidden_size"],
            "num_position_embeddings": 48**2, "deepstack_visual_indexes": list(deepstack),
        },
        image_token_id=image, video_token_id=video, vision_start_token_id=start, vision_end_token_id=end,
        tie_word_embeddings=True, attn_implementation="sdpa",
    )  # fmt: skip


def _reader(config: Qwen3VLConfig, tower: ScratchVision) -> ImageReader:
    with TemporaryDirectory() as directory:
        image_processor(tower).save_pretrained(directory)
        return ImageReader(Path(directory), config.to_dict())
