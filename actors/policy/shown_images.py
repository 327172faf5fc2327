"""The images that the messages of one call show."""

from collections.abc import Mapping, Sequence

from actors.episodes.task import JSON
from actors.policy.messages import MessagesError
from bus.images import PlacedImage
from storage.images.chat import NO_VISION, ImageChat
from storage.images.encoded import ImageError, image_of, is_image

DIGESTS = "image_digests"
"""Key of a checked message: the images in it, in their order. Templates do not know it."""


class ShownImages:
    """Reads images as messages are checked, and gives them back in the order of the messages."""

    def __init__(self, chat: ImageChat | None = None) -> None:
        """Read for the model of `chat`; None is a model that sees no images."""
        self._chat = chat
        self._found: dict[str, PlacedImage] = {}
        self._of_message: list[str] = []

    def begin(self) -> None:
        self._of_message = []

    @property
    def of_message(self) -> list[JSON]:
        return list(self._of_message)

    def text_of(self, part: Mapping[str, JSON], where: str) -> str | None:
        """Return the text that stands for an image; None for a part that is none. Raises `MessagesError`."""
        if not is_image(part):
            return None
        if self._chat is None:
            raise MessagesError(f"{where} {NO_VISION}")
        try:
            image = self._chat.reader.read(image_of(part))
        except ImageError as error:
            raise MessagesError(f"{where}: {error}") from error
        self._found[image.digest] = image
        self._of_message.append(image.digest)
        return self._chat.marker

    def refuse_marker(self, said: object, where: str) -> None:
        """Raise `MessagesError` for a text that would be taken for an image: `said`, or one within it."""
        if self._chat is None:
            return
        try:
            self._chat.refuse_marker(said)
        except ImageError as error:
            raise MessagesError(f"{where}: {error}") from error

    def expanded(
        self, token_ids: list[int], messages: Sequence[Mapping[str, JSON]]
    ) -> tuple[list[int], tuple[PlacedImage, ...]]:
        """Return the rendered tokens of checked `messages` with those of their images, and the images in
        their places. Raises `MessagesError`."""
        if self._chat is None:
            return token_ids, ()
        digests = [digest for message in messages for digest in _digests(message)]
        try:
            return self._chat.expanded(token_ids, [self._found[digest] for digest in digests])
        except ImageError as error:
            raise MessagesError(str(error)) from error

    def with_data(self, images: Sequence[PlacedImage]) -> tuple[PlacedImage, ...]:
        """Return placed images with their bytes, which this call has read."""
        return tuple(image._replace(data=self._found[image.digest].data) for image in images)


def _digests(message: Mapping[str, JSON]) -> list[str]:
    found = message.get(DIGESTS)
    return [str(digest) for digest in found] if isinstance(found, list) else []


def without_data(images: Sequence[PlacedImage]) -> tuple[PlacedImage, ...]:
    """Return placed images that hold no bytes, to be remembered."""
    return tuple(image._replace(data=b"") for image in images)
