"""Images on their way to a SGLang server, which makes patches of them itself.

It gets pixels that are resized already: its own image processor resizes with another library, which would
give the tower other patches than the learner's. And it keeps what its vision tower made of an image, by a
digest of the bytes, over updates of weights: so each version of the weights has bytes of its own.
"""

import asyncio
import base64
import zlib
from collections import OrderedDict
from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from actors.engines.base import GenerationRequest
from bus.errors import RequestRefusedError
from bus.images import PlacedImage
from storage.images.encoded import ImageError
from storage.images.reader import ImageReader

REMEMBERED_BYTES = 64 << 20
"""Encoded images that are kept: siblings, and all turns of an episode, show the same ones."""

PNG_END = 12
"""Bytes of the chunk that ends a PNG."""


class SentImages:
    """The images of one model, as a server is to have them."""

    def __init__(self, reader: ImageReader | None) -> None:
        """Take the model's reader; `None` is a model that reads text alone."""
        self._reader = reader
        self._resized: OrderedDict[str, asyncio.Task[bytes]] = OrderedDict()

    @classmethod
    def of(cls, model: Path) -> Self:
        """Return those of a model directory. Raises `ConfigError`."""
        return cls(ImageReader.of(model))

    async def prepared(self, request: GenerationRequest) -> GenerationRequest:
        """Return a request with the bytes that the server gets in place of those that its images have.

        Raises `RequestRefusedError` for an image that it could not get as the learner reads it."""
        if not request.images:
            return request
        if self._reader is None:
            raise RequestRefusedError(f"{request.request_id} shows images, and the model reads none")
        _refuse_others(request, self._reader.shown_ids)
        try:
            resized = [await self._bytes_of(image, self._reader) for image in request.images]
        except ImageError as error:
            raise RequestRefusedError(f"{request.request_id}: {error}") from error
        images = zip(request.images, resized, strict=True)
        return replace(request, images=tuple(image._replace(data=data) for image, data in images))

    async def _bytes_of(self, image: PlacedImage, reader: ImageReader) -> bytes:
        task = self._resized.get(image.digest)
        if task is None:
            task = asyncio.create_task(asyncio.to_thread(reader.resized, image))
            self._resized[image.digest] = task
        self._resized.move_to_end(image.digest)
        found = await asyncio.shield(task)  # others wait for it too
        self._forget_old()
        return found

    def _forget_old(self) -> None:
        done = {name: task for name, task in self._resized.items() if task.done()}
        failed = [name for name, task in done.items() if task.cancelled() or task.exception()]
        for name in failed:
            del self._resized[name], done[name]
        kept = sum(len(task.result()) for task in done.values())
        for name, task in done.items():
            if kept <= REMEMBERED_BYTES:
                break
            kept -= len(task.result())
            del self._resized[name]


def _refuse_others(request: GenerationRequest, shown_ids: Set[int]) -> None:
    """Raise `RequestRefusedError` for a prompt of which the server would take another token for an image."""
    once = _each_once(request.token_ids, request.images)
    others = [token for token in once if int(token) in shown_ids]
    if len(others) != len(request.images):
        raise RequestRefusedError(
            f"{request.request_id} has {len(others) - len(request.images)} tokens beside those of its "
            f"{len(request.images)} images that stand for a patch and were sampled: SGLang takes each for an "
            'image. Where a policy samples them often, set actors.engine.type = "embedded"'
        )


def image_fields(request: GenerationRequest, salt: str) -> dict[str, Any]:
    """Return what /generate wants for a request with images: `salt` is another for other weights.

    In the prompt one token stands for each image, which the server repeats."""
    tokens = [int(token) for token in request.token_ids]
    if not request.images:
        return {"input_ids": tokens}
    return {
        "input_ids": _each_once(tokens, request.images),
        "image_data": [base64.b64encode(_salted(image.data, salt)).decode() for image in request.images],
    }


def _salted(png: bytes, salt: str) -> bytes:
    """Return the same picture with a comment."""
    chunk = b"tEXtComment\0" + salt.encode()
    length, check = (len(chunk) - 4).to_bytes(4), zlib.crc32(chunk).to_bytes(4)
    return png[:-PNG_END] + length + chunk + check + png[-PNG_END:]


def _each_once(tokens: Sequence[int], images: Sequence[PlacedImage]) -> list[int]:
    found: list[int] = []
    end = 0
    for image in images:
        found += tokens[end : image.start + 1]
        end = image.stop
    return [*found, *tokens[end:]]
