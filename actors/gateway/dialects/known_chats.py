"""The chats of a session's latest requests: a request repeats all messages of its chat, of which only the new
ones are read."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeVar

from pydantic import BaseModel, JsonValue
from pydantic_core import from_json

from actors.episodes.task import ChatMessage
from actors.gateway.dialects.refusal import parsed

MOST_KNOWN = 4
"""Chats of a session that are kept: its agents may ask in turns."""
R = TypeVar("R", bound=BaseModel)
Meaning = tuple[ChatMessage, ...]
"""What one message of a request comes to."""


@dataclass(frozen=True, slots=True, eq=False)
class _KnownChat:
    """The messages of a request, as they came and what they came to."""

    kind: type[BaseModel]
    given: Sequence[JsonValue] = ()
    meanings: tuple[Meaning, ...] = ()

    def repeated_by(self, given: Sequence[JsonValue], *, has_numbers: bool) -> int:
        """Return how many of the first messages are these; equal numbers may be written otherwise."""
        differing = (
            number
            for number, (a, b) in enumerate(zip(self.given, given, strict=False))
            if a != b or (has_numbers and repr(a) != repr(b))
        )
        return next(differing, min(len(self.given), len(given)))


class KnownChats:
    """Reads the requests of one session."""

    def __init__(self) -> None:
        self._chats: deque[_KnownChat] = deque(maxlen=MOST_KNOWN)

    def read(
        self, raw: bytes, kind: type[R], read: Callable[[R], list[Meaning]], *, has_numbers: bool = False
    ) -> tuple[R, tuple[Meaning, ...]]:
        """Return a request with its new messages alone, of which there is one at least, and what all of them
        come to. Raises `RefusedError`.

        Args:
            raw: the body, whose `messages` are the chat.
            kind: what it is read as.
            read: returns what the messages of a request come to.
            has_numbers: whether more than text is read of a message."""
        try:
            body = from_json(raw, allow_inf_nan=False)
            given = body["messages"]
            known = (chat for chat in self._chats if chat.kind is kind)
            repeated = ((chat.repeated_by(given, has_numbers=has_numbers), chat) for chat in known)
            repeats, chat = max(repeated, key=itemgetter(0), default=(0, _KnownChat(kind)))
            count = min(repeats, len(given) - 1)
            request = kind.model_validate({**body, "messages": given[count:]})
        except (KeyError, TypeError, ValueError):
            request = parsed(kind, raw)  # it names what is wrong by its place in the whole
            return request, tuple(read(request))
        meanings = (*chat.meanings[:count], *read(request))
        if chat in self._chats and repeats == len(chat.given):  # the new one begins with it
            self._chats.remove(chat)
        self._chats.append(_KnownChat(kind, (*chat.given[:count], *given[count:]), meanings))
        return request, meanings
