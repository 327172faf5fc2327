"""The chats of a session's latest requests: a request repeats all messages of its chat, of which only the new
ones are read."""

import marshal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Generic, TypeVar

from pydantic import BaseModel, JsonValue
from pydantic_core import from_json

from actors.episodes.task import ChatMessage
from actors.gateway.dialects.refusal import parsed

MOST_KNOWN = 4
"""Chats of a session that are kept: its agents may ask in turns."""
R = TypeVar("R", bound=BaseModel)
M = TypeVar("M")
Meaning = tuple[ChatMessage, ...]
"""What one message of a request comes to, in most APIs."""


@dataclass(frozen=True, slots=True, eq=False)
class _KnownChat(Generic[M]):
    """The messages of a request, as they came and what they came to."""

    kind: type[BaseModel]
    given: Sequence[JsonValue] = ()
    meanings: tuple[M, ...] = ()

    def repeated_by(self, given: Sequence[JsonValue], *, has_numbers: bool) -> int:
        """Return how many of the first messages are these."""
        differing = (
            number
            for number, (a, b) in enumerate(zip(self.given, given, strict=False))
            if (_exact(a) != _exact(b) if has_numbers else a != b)
        )
        return next(differing, min(len(self.given), len(given)))


def _exact(given: JsonValue) -> bytes:
    """Return what tells numbers apart that are equal and written otherwise, such as 1, 1.0 and true."""
    return marshal.dumps(given, 2)  # later versions write a string by whether other objects share it


class KnownChats(Generic[M]):
    """Reads the requests of one session, each message of which comes to an `M`."""

    def __init__(self) -> None:
        self._chats: deque[_KnownChat[M]] = deque(maxlen=MOST_KNOWN)

    def read(
        self, raw: bytes, kind: type[R], read: Callable[[R, Sequence[M]], list[M]], *,
        field: str = "messages", continued_by: Sequence[str] = (), has_numbers: bool = False,
        stands_alone: Callable[[JsonValue], bool] = lambda _: True,
    ) -> tuple[R, tuple[M, ...]]:  # fmt: skip
        """Return a request with its new messages alone, of which there is one at least, and what all of them
        come to. Raises `RefusedError`.

        Args:
            raw: the body.
            kind: what it is read as.
            read: returns what the messages of a request come to, given what those before them came to.
            field: name of the body's list of messages.
            continued_by: fields of which one that is set names what stands before the messages; all messages
                of such a request are new.
            has_numbers: whether more than text is read of a message.
            stands_alone: whether a message comes to the same whatever stands before it; from the latest one
                that does, messages are read again."""
        try:
            body = from_json(raw, allow_inf_nan=False)
            given = _whole_chat(body, field, continued_by)
            known = (chat for chat in self._chats if chat.kind is kind)
            repeated = ((chat.repeated_by(given, has_numbers=has_numbers), chat) for chat in known)
            unknown: _KnownChat[M] = _KnownChat(kind)
            repeats, chat = max(repeated, key=itemgetter(0), default=(0, unknown))
            count = min(repeats, len(given) - 1)
            count = next((number for number in range(count, 0, -1) if stands_alone(given[number])), 0)
            request = kind.model_validate({**body, field: given[count:]})
        except (KeyError, TypeError, ValueError):
            request = parsed(kind, raw)  # the error names its place in the whole request
            return request, tuple(read(request, ()))
        before = chat.meanings[:count]
        meanings = (*before, *read(request, before))
        if chat in self._chats and repeats == len(chat.given):  # the new chat begins with the known one
            self._chats.remove(chat)
        self._chats.append(_KnownChat(kind, (*chat.given[:count], *given[count:]), meanings))
        return request, meanings


def _whole_chat(body: dict[str, JsonValue], field: str, continued_by: Sequence[str]) -> list[JsonValue]:
    """Return the messages of a body. Raises TypeError where they are no list, or go on from others."""
    given = body[field]
    if not isinstance(given, list) or any(map(body.get, continued_by)):
        raise TypeError(field)
    return given
