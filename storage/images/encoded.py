"""Images in the parts of messages: found, read and checked; encoded bytes stay as they are."""

import base64
import binascii
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from io import BytesIO
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from bus.codec import Json
from bus.errors import SluiceError

FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "MPO": "image/jpeg"}
"""Formats that are taken, with their media types: what decodes to the same pixels everywhere. MPO is what
Pillow calls a JPEG file with further pictures behind the first, as cameras and phones write."""
DEEP = ("I", "F")
"""Beginnings of the modes of images with more than 8 bits a channel, whose values Pillow would cut off."""
ORIENTATION = 0x0112
"""Number of the EXIF tag that says how a picture is to be turned."""
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What turns a picture upright, by its EXIF orientation."""
KINDS = ("image", "image_url", "input_image")
"""Types of the parts of a message that are images."""
PLACE = "<image>"
"""Text that stands for the next image of a row, where no part of its messages does."""
REMEMBERED = 64
"""Data URIs whose bytes are remembered: all rollouts of a group ask with the same one."""


class ImageError(SluiceError, ValueError):
    """An image cannot be read, or not by this model; the message says what to do."""


def is_image(part: object) -> bool:
    """Tell whether a part of a message is an image."""
    return isinstance(part, Mapping) and part.get("type") in KINDS


def image_of(part: Mapping[str, object]) -> bytes:
    """Return the encoded bytes of a part that has them in it. Raises `ImageError`."""
    source = _source(part)
    if isinstance(source, str) and source.startswith("data:"):
        return _of_uri(source)
    if source is None:
        raise ImageError("an image without data: give it as a data URI (data:image/png;base64,...)")
    raise ImageError(
        f"the image {str(source)[:80]!r} is not in the message: give it as a data URI "
        "(data:image/png;base64,...); files are read in data files alone"
    )


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """The files of images that a data file names."""

    directory: Path
    """The directory of the data file, to which paths are relative."""
    read: set[Path] = field(default_factory=set)
    """Image files that were read."""
    fetch: Callable[[Path], None] | None = None
    """What fetches a file that is not here, if it knows from where."""

    def bytes_of(self, name: str) -> bytes:
        """Read a file. Raises `ImageError`."""
        path = self.directory / name
        if self.fetch is not None and not path.exists():
            self.fetch(path)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ImageError(f"the image {path} cannot be read ({error.strerror}): check the path") from error
        self.read.add(path)
        return data


def embedded(content: list[Json], files: ImageFiles, column: object = None) -> list[Json]:
    """Return chat messages in which each image is a data URI.

    Args:
        content: the messages of a row of a data file.
        files: of images, beside that file.
        column: images of the row in their order, for parts that name none, or else for each `PLACE` in the
            texts: paths, or bytes as Hugging Face datasets have them.
    Raises `ImageError`."""
    given = column if isinstance(column, list) else []
    if given and not any(is_image(part) for message in content for part in _parts(message)):
        content = [_divided(message) for message in content]
    left = iter(given)
    found = [_embedded_message(message, files, left) for message in content]
    if unused := sum(1 for _ in left):
        raise ImageError(
            f"'images' has {len(given)} images, and the messages show {len(given) - unused} of them: write "
            f"{PLACE} or a part of type image where each belongs, or give the column another name"
        )
    return found


def _parts(message: Json) -> list[Json]:
    parts = message.get("content") if isinstance(message, dict) else None
    return parts if isinstance(parts, list) else []


def _divided(message: Json) -> Json:
    if not isinstance(message, dict) or PLACE not in str(message.get("content")):
        return message
    parts = _parts(message) or [{"type": "text", "text": message["content"]}]
    return {**message, "content": [piece for part in parts for piece in _pieces(part)]}


def _pieces(part: Json) -> list[Json]:
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str) or PLACE not in text:
        return [part]
    pieces: list[Json] = []
    for number, piece in enumerate(text.split(PLACE)):
        pieces += [{"type": "image"}] if number else []
        pieces += [{"type": "text", "text": piece}] if piece else []
    return pieces


def _embedded_message(message: Json, files: ImageFiles, left: Iterator[object]) -> Json:
    if not isinstance(message, dict) or not isinstance(parts := message.get("content"), list):
        return message
    shown = [
        _uri_part(part, files, left) if isinstance(part, dict) and is_image(part) else part for part in parts
    ]
    return {**message, "content": shown}


def _uri_part(part: Mapping[str, Json], files: ImageFiles, left: Iterator[object]) -> Json:
    source: object = _source(part)
    if source is None:
        source = next(left, None)
        if source is None:
            raise ImageError(
                "an image part without an image: give its path or a data URI, or a column 'images'"
            )
    data = _read(source, files)
    kind = FORMATS[decoded(data)[0]]
    return {
        "type": "image_url",
        "image_url": {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"},
    }


def _source(part: Mapping[str, object]) -> object:
    """Return what a part says of where its image is: OpenAI's shapes, or that of chat templates."""
    found = part.get("image_url", part.get("image"))
    return found.get("url") if isinstance(found, Mapping) else found


def _read(source: object, files: ImageFiles) -> bytes:
    if isinstance(source, Mapping):
        if isinstance(data := source.get("bytes"), bytes):
            return data
        source = source.get("path")
    if not isinstance(source, str):
        raise ImageError(f"an image is {type(source).__name__}: give a path, a data URI or bytes")
    if source.startswith("data:"):
        return _of_uri(source)
    if not _is_path(source):
        raise ImageError(f"the image {source[:80]!r} is not fetched: download it, and give its path")
    return files.bytes_of(source)


def _is_path(source: str) -> bool:
    return not source.startswith("data:") and "://" not in source


def named_files(content: Json, column: object = None) -> Iterator[str]:
    """Yield the paths of images that a row of a data file names, whatever else is wrong with it. `content`
    and `column` are what `embedded` takes; the content may be a text, too."""
    messages = content if isinstance(content, list) else []
    shown = [
        _source(part)
        for message in messages
        for part in _parts(message)
        if isinstance(part, dict) and is_image(part)
    ]
    for source in [*shown, *(column if isinstance(column, list) else ())]:
        if isinstance(source, Mapping):
            source = None if isinstance(source.get("bytes"), bytes) else source.get("path")
        if isinstance(source, str) and _is_path(source):
            yield source


@lru_cache(REMEMBERED)
def _of_uri(uri: str) -> bytes:
    head, comma, body = uri.partition(",")
    try:
        if not (comma and head.endswith(";base64")):
            raise ValueError("it is not base64")  # noqa: TRY301  # said in one place
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"the data URI {uri[:60]!r} is none: {error}") from error


def decoded(data: bytes) -> tuple[str, Image.Image]:
    """Return the format of an image, and its pixels in RGB, upright. Raises `ImageError`."""
    try:
        with Image.open(BytesIO(data)) as image:
            found = str(image.format)
            _refuse_unfit(image)  # before anything of another format is decoded
            image.load()
            turn = TURNS.get(image.getexif().get(ORIENTATION, 1))
            pixels = image.convert("RGB")
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        raise ImageError(f"an image is too large ({error}): save a smaller one") from error
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        raise ImageError(
            f"{len(data)} bytes are no image that can be read ({error}): use PNG or JPEG"
        ) from error
    return found, pixels if turn is None else pixels.transpose(turn)


def _refuse_unfit(image: Image.Image) -> None:
    """Raise `ImageError` for another format, or for pixels that would not be what the picture shows."""
    found = str(image.format)
    if found not in FORMATS:
        raise ImageError(f"an image is {found}: save it as PNG or JPEG")
    if found == "PNG" and (pictures := getattr(image, "n_frames", 1)) > 1:
        raise ImageError(f"an image is animated, of {pictures} pictures: save one of them")
    if image.mode.startswith(DEEP):
        raise ImageError(f"an image has more than 8 bits a channel (mode {image.mode}): save it with 8")
