"""Proves at the start that packed sequences give what transformers itself gives of each alone.

This backend takes any model of transformers, so that nobody has read the code of each. What a family does
besides the attention that this backend computes (a state that goes from token to token, scaled logits,
positions of another kind) shows here, before anything is trained."""

from dataclasses import replace
from io import BytesIO

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PretrainedConfig

from bus.errors import ConfigError
from learner.backends.fsdp.build import UNBUILDABLE, refusal
from learner.backends.fsdp.model import ShardedModel
from learner.data.packing import MicroBatch, Sample, micro_batch_of
from learner.distributed.process_group import device
from storage.images.reader import ImageReader

LENGTHS = (11, 5, 8)
"""Tokens of the sequences that are compared."""
IMAGE = (60, 90)
"""Height and width, in pixels, of the image that a vision-language model is shown."""
BEFORE_IMAGE = 4
"""Tokens before the image."""
LARGEST_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Nats by which the log-probs may differ, since kernels add up in other orders."""


@torch.no_grad()
def refuse_other_results(model: ShardedModel, vocab_size: int, dtype: torch.dtype) -> None:
    """Raise `ConfigError` where the log-probs of a pack are not transformers' own, or would not be those of
    longer sequences. Every rank calls this."""
    draw = np.random.default_rng(0)
    samples = [
        Sample(
            token_ids=draw.integers(0, vocab_size, length).astype(np.int32),
            loss_mask=np.ones(length, bool),
            streams={},
        )
        for length in LENGTHS
    ]
    if model.vision is not None:
        samples = [_without_images(sample, model.vision.reader) for sample in samples]
        samples[0] = _showing(samples[0], model.vision.reader, draw)
    batch = micro_batch_of(samples).to(device())
    try:
        packed, _ = model(batch)
        [logits] = model(batch, plain=True)
    except (ConfigError, torch.OutOfMemoryError):
        raise
    except UNBUILDABLE as error:
        raise ConfigError(refusal([f"its forward pass does not take packed sequences: {error!r}"])) from error
    if _has_windows(model.hf.config.get_text_config()) and not model.windows:
        what = "its sliding window is in transformers' mask alone, which a pack does without"
        raise ConfigError(refusal([what]))
    if model.scores:
        plain = logits[:, 0]
    else:
        plain = torch.log_softmax(logits, -1).gather(-1, batch.labels[:, None])[:, 0]
    difference = (packed - plain[batch.trained]).abs().max().item()
    if not difference <= LARGEST_DIFFERENCE[dtype]:
        what = f"log-probs in a pack are up to {difference:.3g} nats from transformers' own of each sequence"
        raise ConfigError(refusal([what]))
    if model.replay.given:
        _refuse_other_routers(model, batch, packed, dtype)


def _refuse_other_routers(
    model: ShardedModel, batch: MicroBatch, expected: Tensor, dtype: torch.dtype
) -> None:
    """Raise `ConfigError` where log-probs are others when each router is given what it would choose itself:
    this version of transformers then weighs experts otherwise than router replay does."""
    model.replay.note()
    model(batch)
    [experts] = model.replay.noted()
    replayed, _ = model(replace(batch, experts=experts.to(device())))
    model.replay.forget_counts()
    difference = (replayed - expected).abs().max().item()
    if not difference <= LARGEST_DIFFERENCE[dtype]:
        what = f"its routers weigh experts otherwise than router replay, by up to {difference:.3g} nats"
        raise ConfigError(refusal([what]))


def _without_images(sample: Sample, reader: ImageReader) -> Sample:
    return replace(sample, token_ids=np.where(sample.token_ids == reader.token_ids[1], 0, sample.token_ids))


def _showing(sample: Sample, reader: ImageReader, draw: np.random.Generator) -> Sample:
    file = BytesIO()
    Image.fromarray(draw.integers(0, 256, (*IMAGE, 3), np.uint8)).save(file, "PNG")
    image = reader.read(file.getvalue()).moved(BEFORE_IMAGE)
    tokens = np.insert(sample.token_ids, BEFORE_IMAGE, np.full(image.stop - image.start, reader.token_ids[1]))
    mask = np.ones(len(tokens), bool)
    mask[image.start : image.stop] = False
    return replace(sample, token_ids=tokens.astype(np.int32), loss_mask=mask, images=(image,))


def _has_windows(hf_config: PretrainedConfig) -> bool:
    """Tell whether layers of the model see a sliding window, which may be longer than `LENGTHS`."""
    if kinds := getattr(hf_config, "layer_types", None):
        return "sliding_attention" in kinds
    used = getattr(hf_config, "use_sliding_window", True)
    return bool(used and getattr(hf_config, "sliding_window", None))
