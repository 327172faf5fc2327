"""Images on their way to a SGLang server, which makes patches of them itself.

It gets pixels that are resized already: its own image processor resizes with another library, which would
give the tower other patches than the learner's. And it keeps what its vision tower made of an image, by a
digest of the bytes, over updates of weights: so each version of the weights has bytes of its own.

All that takes long is done once for an image, in a thread. A request itself copies what that made: of an
image of 2048 x 2048 pixels it has 17 MB of text.
"""

import asyncio
import base64
import json
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
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
ENCODED_END = 20
"""Characters that encode the last 13 to 15 bytes: that chunk, and what is before it of their threes."""
STEP_BYTES = 3 << 18
"""Bytes that are encoded without a break, in which the event loop may go on; whole threes."""


class SentImages:
    """The images of one model, as a server is to have them."""

    def __init__(self, reader: ImageReader | None) -> None:
        """Take the model's reader; `None` is a model that reads text alone."""
        self._reader = reader
        self._resized: OrderedDict[str, asyncio.Task[bytes]] = OrderedDict()

    @classmethod
    def of(cls, model: Path) -> Self:
        """Return the images of the model in a directory. Raises `ConfigError`."""
        return cls(ImageReader.of(model))

    async def prepared(self, request: GenerationRequest) -> GenerationRequest:
        """Return a request with what the server gets, PNGs in base64, in place of the bytes of its images.
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
            task = asyncio.create_task(asyncio.to_thread(_encoded, reader, image))
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
    """Return what /generate wants for a request with images: `salt` is another for other weights. Images are
    base64 in bytes, as `as_json` wants them. In the prompt one token stands for each, which the server
    repeats."""
    tokens = list(map(int, _each_once(request.token_ids, request.images)))
    if not request.images:
        return {"input_ids": tokens}
    return {"input_ids": tokens, "image_data": [_salted(image.data, salt) for image in request.images]}


def as_json(body: Mapping[str, Any]) -> bytes:
    """Return what a request says as JSON. Images stay as they are: json would look at each character."""
    if not (images := body.get("image_data")):
        return json.dumps(body).encode()
    rest = json.dumps({name: value for name, value in body.items() if name != "image_data"}).encode()
    return b"".join((rest[:-1], b', "image_data": ["', b'", "'.join(images), b'"]}'))


def _encoded(reader: ImageReader, image: PlacedImage) -> bytes:
    png = reader.resized(image)
    return b"".join(base64.b64encode(png[n : n + STEP_BYTES]) for n in range(0, len(png), STEP_BYTES))


def _salted(encoded: bytes, salt: str) -> bytes:
    """Return the same picture with a comment; both are in base64."""
    end = base64.b64decode(encoded[-ENCODED_END:])
    chunk = b"tEXtComment\0" + salt.encode()
    length, check = (len(chunk) - 4).to_bytes(4), zlib.crc32(chunk).to_bytes(4)
    commented = end[:-PNG_END] + length + chunk + check + end[-PNG_END:]
    return b"".join((memoryview(encoded)[:-ENCODED_END], base64.b64encode(commented)))


def _each_once(tokens: Sequence[int], images: Sequence[PlacedImage]) -> list[int]:
    found: list[int] = []
    end = 0
    for image in images:
        found += tokens[end : image.start + 1]
        end = image.stop
    return [*found, *tokens[end:]]
