"""The probe: fixed token sequences that the learner scores at each version, to compare engines with.

An engine that does not give them the same log-probs samples from another policy than it says."""

import time
from collections.abc import Awaitable, Callable
from io import BytesIO

import numpy as np
from PIL import Image
from transformers import PretrainedConfig

from bus.images import shown_tokens
from bus.messages import Probe
from learner.backends.contract.backend import Backend
from learner.data.packing import Sample
from learner.logprobs.logprobs import score
from storage.images.reader import ImageReader

SEQUENCES = 4
LENGTH = 32
LEFT_FREE = 7
"""Tokens of the context that SGLang keeps from prompts, those that it scores among them."""
SEED = 17
"""Seed of the tokens: random ones suit any vocabulary, and reach rows that training does not."""
IMAGE = (2, 3)
"""Rows and columns of tokens that stand for the image, unless a model makes more of the smallest one."""
BEHIND_IMAGE = 16
"""Tokens behind the image, which alone tell of the vision tower."""
LARGEST_PART = 0.02
"""Part of the time of training that scoring the probe may take."""
LONGEST_GAP_S = 60.0
"""Longest time without a scored version, however long scoring took: the first time it also compiles."""


class ProbeTurns:
    """Scores the probe at each version, or where steps are short at as many as cost little time.

    A pass over a few tokens takes as long as the model has layers to launch, which is a quarter of a step of
    a small model on a GPU."""

    def __init__(self, *, at_each: bool, now: Callable[[], float] = time.monotonic) -> None:
        """With `at_each` every version is scored, whatever that costs."""
        self._at_each = at_each
        self._now = now
        self._next_at = float("-inf")

    async def scored(self, score: Callable[[], Awaitable[Probe]], *, needed: bool) -> Probe | None:
        """Return what `score` returns; None for a version that is passed over, which none is that is
        `needed`."""
        began = self._now()
        if not (self._at_each or needed or began >= self._next_at):
            return None
        probe = await score()
        ended = self._now()
        self._next_at = ended + min((ended - began) / LARGEST_PART, LONGEST_GAP_S)
        return probe


def probe_samples(config: PretrainedConfig, images: ImageReader | None) -> list[Sample]:
    """Return the sequences for a model: those of text, and one that shows an image to a model that sees."""
    samples = [
        Sample(token_ids=row, loss_mask=np.ones(len(row), bool), streams={}) for row in probe_tokens(config)
    ]
    return samples if images is None else [*samples, *_showing(config, images)]


def probe_tokens(config: PretrainedConfig) -> np.ndarray:
    """Return the sequences of text for a model, int32 [4, 32], or shorter ones where its context is."""
    vocab_size = config.get_text_config().vocab_size
    length = min(LENGTH, max(2, _room(config)))
    return np.random.default_rng(SEED).integers(0, vocab_size, (SEQUENCES, length), dtype=np.int32)


def scored_probe(backend: Backend, images: ImageReader | None = None) -> Probe:
    """Return the probe with the log-probs of the weights as they are. Every rank calls this. `images` are
    those of a vision-language model."""
    samples = probe_samples(backend.hf_config, images)
    tokens = sum(len(sample.token_ids) for sample in samples)
    found = score(backend, samples, tokens_per_micro_batch=tokens)
    return Probe(
        token_ids=tuple(tuple(sample.token_ids.tolist()) for sample in samples),
        logprobs=tuple(
            tuple(scores.logprobs[1:][sample.loss_mask[1:]].tolist())
            for sample, scores in zip(samples, found, strict=True)
        ),
        images=tuple(sample.images for sample in samples) if images is not None else (),
    )


def drawn_image(side: int) -> bytes:
    """Return a PNG of a disc on a slope of colours, for a model whose tokens stand for squares of `side`
    pixels."""
    height, width = (side * tokens for tokens in IMAGE)
    rows, columns = np.indices((height, width))
    slopes = np.stack((255 * rows / height, 255 * columns / width, 255 - 255 * rows / height), axis=-1)
    disc = np.hypot(rows - height / 2, columns - width / 3) < height / 3
    slopes[disc] = (230, 40, 90)
    file = BytesIO()
    Image.fromarray(slopes.astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def _showing(config: PretrainedConfig, reader: ImageReader) -> list[Sample]:
    start, pad, end = reader.token_ids
    image = reader.read(drawn_image(reader.side))
    behind = min(BEHIND_IMAGE, _room(config) - 3 - image.rows * image.columns)
    if behind < 1:
        return []
    special = [*reader.token_ids, *reader.shown_ids]  # which a server would take for an image
    text = np.setdiff1d(np.arange(config.get_text_config().vocab_size), special)
    first, *rest = np.random.default_rng(SEED).choice(text, 1 + behind)
    image = image.moved(2)
    tokens = np.array([first, start, *[pad] * (image.stop - image.start), end, *rest], np.int32)
    mask = ~shown_tokens(len(tokens), (image,))
    return [Sample(token_ids=tokens, loss_mask=mask, streams={}, images=(image,))]


def _room(config: PretrainedConfig) -> int:
    return int(getattr(config.get_text_config(), "max_position_embeddings", LEFT_FREE + LENGTH)) - LEFT_FREE
