"""Encoded images as a vision model takes them: by the image processor of its directory, the same everywhere.

It is transformers' processor on PIL, whatever else is installed: a process that resizes with another library
would compute with other pixels than the engine."""

import json
from collections import OrderedDict
from collections.abc import Mapping
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bus.errors import ConfigError
from bus.images import PlacedImage, image_digest
from storage.images.encoded import REMEMBERED, ImageError, decoded
from storage.model_files.families import family_named
from storage.model_files.model_reading import AGAIN, refusing

if TYPE_CHECKING:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
"""Files that may describe the image processor: as models are published, and as transformers 5 saves them."""
REMEMBERED_BYTES = 256 << 20
"""Patches that are kept: several passes of a step, and siblings, want the same ones."""


class ImageReader:
    """The images of one model: how many tokens stand for one, and its patches."""

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        """Read the image processor. Raises `ConfigError` where it is missing or not the model's."""
        self.model_type = str(config["model_type"])
        self._processor = _processor(directory, config["vision_config"])
        self.token_ids = tuple(
            int(config[name]) for name in ("vision_start_token_id", "image_token_id", "vision_end_token_id")
        )
        """The tokens before an image, for each merged patch of it, and behind it."""
        self.shown_ids = frozenset(
            int(config[name]) for name in ("image_token_id", "video_token_id") if name in config
        )
        """Tokens that stand for a patch of an image or a video."""
        self._merge = int(self._processor.merge_size)
        self.side = self._merge * int(self._processor.patch_size)
        """Pixels of each side of the square that a token stands for."""
        self._read_once = lru_cache(REMEMBERED)(self._read)  # siblings show the same one
        self._patches: OrderedDict[tuple[str, int, int], NDArray[np.float32]] = OrderedDict()

    @classmethod
    def of(cls, directory: Path) -> Self | None:
        """Return the reader of a model directory, or None for a model that sees no images. Raises
        `ConfigError`."""
        try:
            config = json.loads((directory / "config.json").read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {directory / 'config.json'}: {error}") from error
        if not (isinstance(config, dict) and family_named(config.get("model_type")).sees_images):
            return None
        with refusing(f"cannot read what {directory} says of images", AGAIN):
            return cls(directory, config)

    def read(self, data: bytes) -> PlacedImage:
        """Return an image, as if it stood at token 0. Raises `ImageError`."""
        return self._read_once(data)

    def _read(self, data: bytes) -> PlacedImage:
        _, pixels = decoded(data)
        width, height = pixels.size
        try:
            height, width = self._size(height, width)
        except ValueError as error:
            raise ImageError(f"an image of {width} x {height} pixels is too narrow: {error}") from error
        return PlacedImage(image_digest(data), 0, height // self.side, width // self.side, data)

    def _size(self, height: int, width: int) -> tuple[int, int]:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        size = self._processor.size
        found: tuple[int, int] = smart_resize(
            height, width, factor=self.side, min_pixels=size["shortest_edge"], max_pixels=size["longest_edge"]
        )
        return found

    def resized(self, image: PlacedImage) -> bytes:
        """Return a PNG of the pixels of which the patches of an image are made.

        Another image processor of this model makes the same patches of it, whatever that resizes with: it
        finds the image upright, in RGB and of its final size. Raises `ImageError` where it would resize it
        again."""
        height, width = image.rows * self.side, image.columns * self.side
        _, pixels = decoded(image.data)
        if (again := self._size(height, width)) != (height, width):
            raise ImageError(
                f"an image of {pixels.width} x {pixels.height} pixels is resized to {width} x {height} ones, "
                f"and those to {again[1]} x {again[0]}: save one that is less narrow"
            )
        one = self._processor
        planes = np.asarray(pixels).transpose(2, 0, 1)
        made = np.asarray(one.resize(planes, one.size, one.resample, self.side))
        file = BytesIO()
        Image.fromarray(made.transpose(1, 2, 0)).save(file, "PNG", compress_level=1)  # a PNG is read once
        return file.getvalue()

    def patches(self, image: PlacedImage) -> NDArray[np.float32]:
        """Return the patches of an image, [rows * columns * merged, values]. Raises `ImageError` where this
        processor makes another number of tokens of it than it has."""
        key = image.digest, image.rows, image.columns
        found = self._patches.pop(key, None)
        if found is None:
            found = self._processed(image)
        self._patches[key] = found  # now the last to be forgotten
        while (
            sum(each.nbytes for each in self._patches.values()) > REMEMBERED_BYTES and len(self._patches) > 1
        ):
            self._patches.popitem(last=False)
        return found

    def grid(self, image: PlacedImage) -> tuple[int, int, int]:
        """Return the patches of an image in time, height and width, as the model's `grid_thw`."""
        return 1, image.rows * self._merge, image.columns * self._merge

    @property
    def smallest(self) -> NDArray[np.float32]:
        """Return the patches of a black image of one token."""
        one = self._processor
        values = 3 * one.temporal_patch_size * one.patch_size**2
        return np.zeros((self._merge**2, values), np.float32)

    def _processed(self, image: PlacedImage) -> NDArray[np.float32]:
        _, pixels = decoded(image.data)
        made = self._processor(images=[pixels])
        [grid] = np.asarray(made["image_grid_thw"]).tolist()
        if tuple(grid) != self.grid(image):
            raise ImageError(
                f"image {image.digest} has {image.rows} x {image.columns} tokens in its trajectory, and the "
                f"image processor here makes patches of {grid}: actors and learner need the same one"
            )
        return np.asarray(made["pixel_values"], np.float32)


def _processor(directory: Path, vision: Mapping[str, Any]) -> "Qwen2VLImageProcessorPil":
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    file = _processor_file(directory)
    try:
        processor = Qwen2VLImageProcessorPil.from_pretrained(directory)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    if None in (processor.size["shortest_edge"], processor.size["longest_edge"]):
        raise ConfigError(
            f"{file}: size is {dict(processor.size)}: give the fewest and the most pixels of an image as "
            "shortest_edge and longest_edge"
        )
    pairs = (
        ("patch_size", processor.patch_size, vision.get("patch_size")),
        ("merge_size", processor.merge_size, vision.get("spatial_merge_size")),
        ("temporal_patch_size", processor.temporal_patch_size, vision.get("temporal_patch_size")),
        ("do_resize", processor.do_resize, True),
    )
    if other := [f"{name} is {has}, the model's {wants}" for name, has, wants in pairs if has != wants]:
        raise ConfigError(f"{file}: {', '.join(other)}: it is of another model")
    return processor


def _processor_file(directory: Path) -> Path:
    """Return the file that transformers reads the image processor from: the first that describes one. Raises
    `ConfigError` where there is none."""
    if (whole := directory / PROCESSOR).is_file():
        try:
            if "image_processor" in json.loads(whole.read_bytes()):
                return whole
        except ValueError as error:
            raise ConfigError(f"cannot read {whole}: {error}") from error
    if not (directory / PREPROCESSOR).is_file():
        raise ConfigError(
            f"{directory} has no {PREPROCESSOR}, and no {PROCESSOR} with an image processor: copy it from "
            "the model that it is of"
        )
    return directory / PREPROCESSOR
