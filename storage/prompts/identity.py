"""Which prompt a prompt is: the digests by which ledgers and copies know prompts."""

from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from bus.codec import Json, Message, encode
from bus.messages import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class _WithoutTools(Message, tag="prompt"):
    """A prompt as every build had it: prompts without tools keep the digests that ledgers have noted."""

    content: str | list[Json]
    label: str | None
    metadata: dict[str, Json]


def digest_of(prompts: Iterable[Prompt]) -> str:
    """Return a digest of these prompts in this order."""
    digest = xxhash.xxh3_128()
    for prompt in prompts:
        digest.update(identity_of(prompt))
    return digest.hexdigest()


def identity_of(prompt: Prompt) -> bytes:
    """Return the bytes that say which prompt it is, the same in every build."""
    if prompt.tools:
        return encode(prompt)
    return encode(_WithoutTools(content=prompt.content, label=prompt.label, metadata=prompt.metadata))
