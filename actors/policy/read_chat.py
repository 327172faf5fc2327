"""A chat as it was given and as it was read, so that what a later chat repeats of it is not read again."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass

from actors.episodes.task import JSON, ChatMessage
from actors.policy.chat_messages import Fingerprint, checked_messages, fingerprint
from actors.policy.shown_images import DIGESTS, ShownImages


@dataclass(frozen=True, slots=True)
class ReadChat:
    """The messages of a chat, in three forms of equal number."""

    given: tuple[ChatMessage, ...] = ()
    """Copies: whoever gave a message may change it afterwards."""
    checked: tuple[dict[str, JSON], ...] = ()
    """What templates take."""
    prints: tuple[Fingerprint, ...] = ()

    def repeated_by(self, messages: Sequence[ChatMessage]) -> int:
        """Return how many of the first messages are these, as a template writes them: 1, 1.0 and True are
        equal, but are written in other ways."""
        first = tuple(messages[: len(self.given)])
        if first == self.given and repr(first) == repr(self.given):
            return len(self.given)
        pairs = enumerate(zip(self.given, messages, strict=False))
        differing = (number for number, (a, b) in pairs if a != b or repr(a) != repr(b))
        return next(differing, min(len(self.given), len(messages)))

    def followed_by(self, given: ChatMessage, checked: dict[str, JSON], said: Fingerprint) -> "ReadChat":
        """Return the chat with one more message."""
        return ReadChat((*self.given, _copy(given, checked)), (*self.checked, checked), (*self.prints, said))


def read_chat(
    messages: Sequence[ChatMessage], shown: ShownImages, earlier: Iterable[ReadChat] = ()
) -> ReadChat:
    """Read a chat, of which the messages that an `earlier` one begins with are known. A chat repeats all its
    messages in each turn: to read them again would take longer with each turn.

    Raises `MessagesError`."""
    known = max(earlier, key=lambda chat: chat.repeated_by(messages), default=ReadChat())
    count = known.repeated_by(messages)
    checked, new = checked_messages(messages, shown, known.checked[:count]), messages[count:]
    # what a message with images says is told by their digests, as well as by their long texts
    originals = [one if DIGESTS in one else given for one, given in zip(checked[count:], new, strict=True)]
    return ReadChat(
        (*known.given[:count], *map(_copy, new, checked[count:])),
        tuple(checked),
        (*known.prints[:count], *map(fingerprint, checked[count:], originals)),
    )


def _copy(given: ChatMessage, checked: dict[str, JSON]) -> ChatMessage:
    """Return a copy of a message; most are texts alone, whose checked form is one."""
    if not all(isinstance(value, str) for value in given.values()):
        return deepcopy(dict(given))
    return checked if checked == given else dict(given)
