"""Which strand a chat continues: message by message, so that sampled tokens are never tokenised again."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from actors.episodes.task import JSON, ChatMessage, FixedMessages
from actors.policy.chat_messages import Fingerprint, checked_messages, fingerprint, own_fingerprint
from actors.policy.shown_images import DIGESTS, ShownImages


@dataclass(frozen=True, slots=True)
class ReadChat:
    """The messages of a chat, in three forms of equal number."""

    given: tuple[ChatMessage, ...] = ()
    """Copies, but of `FixedMessages`: whoever gave a message may change it afterwards."""
    checked: tuple[dict[str, JSON], ...] = ()
    """What templates take."""
    prints: tuple[Fingerprint, ...] = ()

    def repeated_by(self, messages: Sequence[ChatMessage]) -> int:
        """Return how many of the first messages are these, as a template writes them: 1, 1.0 and True are
        equal, but are written in other ways."""
        differing = (
            number
            for number, (a, b) in enumerate(zip(self.given, messages, strict=False))
            if a is not b and (a != b or repr(a) != repr(b))
        )
        return next(differing, min(len(self.given), len(messages)))

    def followed_by(self, given: ChatMessage, checked: dict[str, JSON], said: Fingerprint) -> "ReadChat":
        return ReadChat((*self.given, _copy(given, checked)), (*self.checked, checked), (*self.prints, said))


def read_chat(
    messages: Sequence[ChatMessage], shown: ShownImages, earlier: Iterable[ReadChat] = ()
) -> ReadChat:
    """Read a chat, of which the messages that an `earlier` one begins with are known. A chat repeats all its
    messages in each turn: to read them again would take longer with each turn. Raises `MessagesError`."""
    repeated = ((chat.repeated_by(messages), chat) for chat in earlier)
    count, known = max(repeated, key=itemgetter(0), default=(0, ReadChat()))
    checked, new = checked_messages(messages, shown, known.checked[:count]), messages[count:]
    # what a message with images says is told by their digests, as well as by their long texts
    originals = [one if DIGESTS in one else given for one, given in zip(checked[count:], new, strict=True)]
    is_fixed = isinstance(messages, FixedMessages)
    return ReadChat(
        tuple(messages) if is_fixed else (*known.given[:count], *map(_copy, new, checked[count:])),
        tuple(checked),
        (*known.prints[:count], *map(fingerprint, checked[count:], originals)),
    )


def _copy(given: ChatMessage, checked: dict[str, JSON]) -> ChatMessage:
    """Return a copy of a message; most are texts alone, whose checked form is one."""
    if not all(isinstance(value, str) for value in given.values()):
        return deepcopy(dict(given))
    return checked if checked == given else dict(given)


class Boundary(NamedTuple):
    """The end of an answer in a strand."""

    messages: int
    """Number of messages up to the answer, which is the last of them."""
    tokens: int
    closed_by: int | None
    """The token by which the policy ended it; None where it was cut off."""
    answer: ChatMessage
    """The answer as a message of the policy's own, however it is repeated."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages that a strand's tokens came from."""

    tools: bytes
    """Digest of the tools that the prompt names."""
    messages: tuple[Fingerprint, ...] = ()
    boundaries: tuple[Boundary, ...] = ()
    """Answers of the policy whose tokens are in the strand as they were sampled."""
    healed: frozenset[int] = frozenset()
    """Numbers of messages that were repeated in another way of writing."""
    realigned: frozenset[int] = frozenset()
    """Numbers of answers that were repeated without reasoning, or as plain text."""
    chat: ReadChat = field(default_factory=ReadChat)
    """The messages as they were given last, with the answer to them."""

    def shared(self, messages: Sequence[Fingerprint]) -> "Conversation | None":
        """Return this conversation up to the last answer that `messages` repeat; None where there is none."""
        if tuple(messages[: len(self.messages)]) == self.messages and self.boundaries:
            return self  # the usual case, in the same time in each turn of a long chat
        repeated, healed, realigned = 0, set(self.healed), set(self.realigned)
        for kept, given in zip(self.messages, messages, strict=False):
            likeness = kept.likeness(given)
            if likeness is None:
                break
            if likeness != "same":
                (healed if likeness == "healed" else realigned).add(repeated)
            repeated += 1
        boundaries = tuple(boundary for boundary in self.boundaries if boundary.messages <= repeated)
        if not boundaries:
            return None
        count = boundaries[-1].messages
        return Conversation(
            self.tools,
            self.messages[:count],
            boundaries,
            frozenset(number for number in healed if number < count),
            frozenset(number for number in realigned if number < count),
            self.chat,
        )

    def answered(
        self, chat: ReadChat, answer: ChatMessage, text: str, *, tokens: int, closed_by: int | None
    ) -> "Conversation":
        """Return the conversation with what a `chat` says beyond it, and the policy's answer to that."""
        [checked] = checked_messages([answer])
        own = own_fingerprint(checked, answer, text)
        all_messages = (*self.messages, *chat.prints[len(self.messages) :], own)
        boundary = Boundary(len(all_messages), tokens, closed_by, checked)
        return Conversation(
            self.tools,
            all_messages,
            (*self.boundaries, boundary),
            self.healed,
            self.realigned,
            chat.followed_by(answer, checked, own),
        )

    @property
    def departures(self) -> dict[str, int]:
        """Return how many messages were repeated in another way, for the trajectory's metadata."""
        counts = {"healed_messages": len(self.healed), "realigned_messages": len(self.realigned)}
        return {name: count for name, count in counts.items() if count}


def continued(
    messages: Sequence[Fingerprint], tools: bytes, conversations: Sequence[tuple[int, Conversation]]
) -> tuple[int, Conversation] | None:
    """Return the strand of which `messages` repeat most answers, by number, and what they repeat of it. Among
    several it is one that ends there, then one with fewer messages written otherwise, then the newest."""
    found = [
        (
            len(part.messages),
            len(part.messages) == len(whole.messages),
            -len(part.healed) - len(part.realigned),
            number,
            part,
        )
        for number, whole in conversations
        if whole.tools == tools and (part := whole.shared(messages)) is not None
    ]
    if not found:
        return None
    *_, number, part = max(found, key=lambda candidate: candidate[:4])
    return number, part
