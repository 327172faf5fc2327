"""Messages as chat templates take them, and which messages mean the same."""

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple, TypeAlias

from actors.episodes.task import JSON, ChatMessage
from actors.policy.messages import MessagesError, Tool, tool_name
from actors.policy.shown_images import DIGESTS, ShownImages
from storage.chats.template import as_object

Likeness: TypeAlias = Literal["same", "healed", "realigned"]
MOST_CHARACTERS = 16_000_000
"""Characters of a chat beyond which it is refused, before time is spent on its tokens."""
REASONING_KEYS = ("reasoning_content", "reasoning")
"""Names under which clients keep the reasoning of a message."""
WITHOUT_MEANING = frozenset(("role", "content", "tool_calls", "tool_call_id", *REASONING_KEYS))
"""Keys of a message that are compared by rules of their own, or not at all."""
_ENCODER = json.JSONEncoder(sort_keys=True)


def checked_messages(
    messages: Sequence[ChatMessage], shown: ShownImages | None = None, known: Sequence[dict[str, JSON]] = ()
) -> list[dict[str, JSON]]:
    """Return messages in the one form that templates know. Raises `MessagesError`, which names what is wrong.

    The first of them may be `known` in this form.

    Content becomes text: parts are joined, and None is empty. Arguments of tool calls become objects where
    they are JSON of one. Images are read by `shown`; without it there may be none."""
    shown = shown or ShownImages()
    if not messages:
        raise MessagesError("a chat without messages cannot be answered")
    new = enumerate(messages[len(known) :], len(known))
    checked = [*known, *(_checked(message, f"message {number}", shown) for number, message in new)]
    lengths = [len(str(message["content"])) for message in checked]
    if sum(lengths) > MOST_CHARACTERS:
        longest = max(lengths)
        raise MessagesError(
            f"message {lengths.index(longest)} has {longest:,} characters, all together {sum(lengths):,}: "
            f"more than {MOST_CHARACTERS:,} fit into no context"
        )
    return checked


def checked_tools(tools: Sequence[Tool] | None, shown: ShownImages | None = None) -> list[Tool]:
    """Return the tools. Raises `MessagesError` for one that is no function in the shape of OpenAI's, or whose
    texts `shown` would take for an image."""
    for tool in tools or ():
        name = tool_name(tool)
        if shown is not None:
            shown.refuse_marker(tool, f"tool {name}")
    return list(tools or ())


def _checked(message: ChatMessage, where: str, shown: ShownImages) -> dict[str, JSON]:
    if not isinstance(message, Mapping):
        raise MessagesError(f"{where} is {type(message).__name__}, and no object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise MessagesError(f"{where} has no role")
    kept: dict[str, JSON] = {
        key: value
        for key, value in message.items()
        if value is not None and key not in ("reasoning", DIGESTS)
    }
    shown.begin()
    kept["content"] = _text(message.get("content"), where, shown)
    if digests := shown.of_message:
        if role == "assistant":
            raise MessagesError(f"{where} is the assistant's, and shows an image: policies answer in text")
        kept[DIGESTS] = digests
    if (reasoning := _reasoning(message)) is not None:
        kept["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        kept["tool_calls"] = _checked_calls(calls, where)
    shown.refuse_marker({key: value for key, value in kept.items() if key != "content"}, where)
    return kept


def _text(content: JSON, where: str, shown: ShownImages) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        shown.refuse_marker(content, where)
        return content
    if not isinstance(content, Sequence):
        raise MessagesError(
            f"the content of {where} is {type(content).__name__}: text is wanted, or parts of text"
        )
    return "".join(_part(part, where, shown) for part in content)


def _part(part: JSON, where: str, shown: ShownImages) -> str:
    if isinstance(part, Mapping) and (image := shown.text_of(part, where)) is not None:
        return image
    text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise MessagesError(f"a part of {where} is {kind!r} and no text: the policy reads nothing but text")
    return _text(text, where, shown)


def _reasoning(message: ChatMessage) -> str | None:
    values = (message.get(key) for key in REASONING_KEYS)
    return next((value for value in values if isinstance(value, str)), None)


def _checked_calls(calls: JSON, where: str) -> list[JSON]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise MessagesError(f"tool_calls of {where} is {type(calls).__name__} and no list")
    return [_checked_call(call, where) for call in calls]


def _checked_call(call: JSON, where: str) -> JSON:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise MessagesError(f"a tool call of {where} is no object with a function")
    if not isinstance(function.get("name"), str):
        raise MessagesError(f"a tool call of {where} has no name")
    arguments = function.get("arguments") or {}
    return {
        **{key: value for key, value in call.items() if key in ("id", "index") and value is not None},
        "type": "function",
        "function": {"name": function["name"], "arguments": as_object(arguments)},
    }


class Fingerprint(NamedTuple):
    """What a message says, as digests."""

    exact: bytes
    meaning: bytes
    """Role, text without space around it, tool calls without ids and whitespace, and keys of other names."""
    reasoning: bytes | None
    """The reasoning, without space around it; None where there is none."""
    written: bytes | None = None
    """The policy's own answer: the meaning of a message whose content is all that it wrote."""

    def likeness(self, given: "Fingerprint") -> Likeness | None:
        """Return how `given` repeats this message; None where it says something else. "healed": written in
        another way. "realigned": the policy's own answer with its reasoning left out, or with reasoning and
        tool calls as text; a template would render other tokens than it sampled."""
        if given.exact == self.exact:
            return "same"
        if given.meaning == self.meaning and given.reasoning == self.reasoning:
            return "healed"
        if self.written is None:
            return None
        left_out = given.meaning == self.meaning and given.reasoning is None
        return "realigned" if left_out or given.meaning == self.written else None


def fingerprint(message: Mapping[str, JSON], original: ChatMessage) -> Fingerprint:
    """Return the fingerprint of a checked message; `original` is how it was given."""
    calls = message.get("tool_calls")
    reasoning = message.get("reasoning_content")
    meaning: list[JSON] = [
        message["role"],
        _plain(str(message["content"])),
        [call["function"] for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else [],
        _others(message),
    ]
    plain_reasoning = _plain(reasoning) if isinstance(reasoning, str) else ""
    return Fingerprint(
        digest(original), digest(meaning), digest(plain_reasoning) if plain_reasoning else None
    )


def _others(message: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return further keys, such as a name; clients and libraries keep notes of their own in answers."""
    if message["role"] == "assistant":
        return {}
    return {key: value for key, value in message.items() if value and key not in WITHOUT_MEANING}


def own_fingerprint(message: Mapping[str, JSON], original: ChatMessage, text: str) -> Fingerprint:
    """Return the fingerprint of the policy's own answer, which it wrote as `text`."""
    written: list[JSON] = ["assistant", _plain(text), [], {}]
    return fingerprint(message, original)._replace(written=digest(written))


def digest(value: object) -> bytes:
    """Return a digest of a value, whatever the order of its keys. Raises `MessagesError` if it is no JSON."""
    try:
        return blake2b(_ENCODER.encode(value).encode(), digest_size=16).digest()
    except (TypeError, ValueError, RecursionError) as error:
        raise MessagesError(f"messages and tools must be JSON: {error}") from error


def _plain(text: str) -> str:
    return text.replace("\r\n", "\n").strip()
