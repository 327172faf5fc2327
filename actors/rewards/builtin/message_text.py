"""The text of chat messages, for rewards that read or show them."""

from collections.abc import Mapping, Sequence

from actors.episodes.task import JSON, ChatMessage


def text_of(content: JSON) -> str:
    """Return the text of a message's content, also where it is a list of parts."""
    if isinstance(content, Sequence) and not isinstance(content, str):
        return "".join(text_of(part.get("text")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def readable(messages: Sequence[ChatMessage]) -> str:
    """Return the text of a chat; roles are named where there are several messages."""
    texts = [(str(message.get("role", "")), text_of(message.get("content"))) for message in messages]
    return texts[0][1] if len(texts) == 1 else "\n\n".join(f"{role}: {text}" for role, text in texts)
