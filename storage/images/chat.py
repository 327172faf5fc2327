"""Images in chats: as text that the template passes on, and as the tokens that stand for them.

An image becomes the three tokens that Qwen's chat templates write for one, whatever the template is:
<|vision_start|><|image_pad|><|vision_end|>. In the tokens, the middle one is repeated for each merged patch.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self

from bus.codec import Json
from bus.images import PlacedImage
from storage.images.encoded import ImageError, image_of, is_image
from storage.images.reader import ImageReader

NO_VISION = (
    "shows an image, and the model reads nothing but text: choose a vision-language model (docs/vision.md)"
)


class Vocabulary(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        """Return the texts of tokens."""


class ImageChat:
    """Images in the chats of one model."""

    def __init__(self, reader: ImageReader, tokenizer: Vocabulary) -> None:
        texts = tokenizer.convert_ids_to_tokens(list(reader.token_ids))
        self.reader = reader
        self.marker = "".join(texts)
        """Text that stands for an image in a rendered chat."""
        self._reserved = texts[1]
        self._token_id = reader.token_ids[1]

    @classmethod
    def of(cls, directory: Path, tokenizer: Vocabulary) -> Self | None:
        """Return the chat images of a model directory, or None for a model that sees none. Raises
        `ConfigError`."""
        reader = ImageReader.of(directory)
        return None if reader is None else cls(reader, tokenizer)

    def refuse_marker(self, said: object) -> None:
        """Raise `ImageError` for a text that would be taken for an image: `said`, or one within it."""
        if any(self._reserved in text for text in _texts(said)):
            raise ImageError(f"it has {self._reserved} in its text, which stands for an image: leave it out")

    def expanded(
        self, token_ids: Sequence[int], images: Sequence[PlacedImage]
    ) -> tuple[list[int], tuple[PlacedImage, ...]]:
        """Return rendered tokens with as many for each image as it has, and the images in their places.
        Raises `ImageError` where the template has left an image out, or repeated one."""
        if token_ids.count(self._token_id) != len(images):
            raise ImageError(
                f"the chat template shows {token_ids.count(self._token_id)} images of {len(images)}: it must "
                "pass on the content of messages as it is"
            )
        left = iter(images)
        tokens: list[int] = []
        placed = []
        for token in token_ids:
            if token != self._token_id:
                tokens.append(token)
                continue
            placed.append(next(left)._replace(start=len(tokens)))
            tokens += [token] * (placed[-1].stop - placed[-1].start)
        return tokens, tuple(placed)


def inlined(messages: Iterable[Json], images: ImageChat | None) -> tuple[list[Json], list[PlacedImage]]:
    """Return chat messages whose images have become text, and the images in their order. `images` are those
    of the model; None is a model without. Raises `ImageError`."""
    found: list[PlacedImage] = []
    return [_inlined(message, images, found) for message in messages], found


def _texts(said: object) -> Iterator[str]:
    if isinstance(said, str):
        yield said
    elif isinstance(said, Mapping):
        for name, value in said.items():
            yield str(name)
            yield from _texts(value)
    elif isinstance(said, Sequence):
        for value in said:
            yield from _texts(value)


def _inlined(message: Json, images: ImageChat | None, found: list[PlacedImage]) -> Json:
    if not isinstance(message, dict):
        return message
    parts = message.get("content")
    if images is not None:
        images.refuse_marker({name: said for name, said in message.items() if name != "content"})
    if not isinstance(parts, list):
        if images is not None:
            images.refuse_marker(parts)
        return message
    return {**message, "content": "".join(_text(part, images, found) for part in parts)}


def _text(part: Json, images: ImageChat | None, found: list[PlacedImage]) -> str:
    if isinstance(part, Mapping) and is_image(part):
        if images is None:
            raise ImageError(f"it {NO_VISION}")
        found.append(images.reader.read(image_of(part)))
        return images.marker
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise ImageError(f"a part of a message is {kind!r}, neither text nor an image")
    if images is not None:
        images.refuse_marker(text)
    return text
