"""How engines in the learner's cluster ask it to send them weights in a group. Else as `requests.py`."""

from dataclasses import dataclass
from typing import Literal

from bus.codec import Message
from bus.errors import SchemaError


@dataclass(frozen=True, kw_only=True, slots=True)
class BroadcastWanted(Message, tag="broadcast_wanted"):
    """An engine asks to be sent a version, or a later one. Nothing is sent yet."""

    incarnation: str
    """Of the learner that announced it."""
    policy_version: int
    group: str
    """The group that the engine is in already; empty for none."""
    ranks: int
    """Of the engine: they are ranks 1 and up of the group, the learner is rank 0."""
    device: Literal["cpu", "cuda"]
    """Where the engine's weights are."""

    def check(self) -> None:
        """Refuse an engine of no ranks."""
        if self.ranks < 1:
            raise SchemaError(f"an engine of {self.ranks} ranks")


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferedBucket(Message, tag="offered_bucket"):
    """Tensors that an engine is to take at once, sent one after the other, and in which group.

    An offer is one or more of these."""

    group: str
    """Another than the one asked for has to be joined first."""
    host: str
    port: int
    """With `host` where its ranks meet."""
    backend: Literal["gloo", "nccl"]
    policy_version: int
    names: tuple[str, ...]
    """Of Hugging Face."""
    dtypes: tuple[str, ...]
    """Of torch."""
    shapes: tuple[tuple[int, ...], ...]

    def check(self) -> None:
        """Refuse tensors without a dtype or shape."""
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise SchemaError(
                f"{len(self.names)} names, {len(self.dtypes)} dtypes, {len(self.shapes)} shapes"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class BroadcastBegin(Message, tag="broadcast_begin"):
    """The engine stands still and waits: send what was offered."""

    group: str
    policy_version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BroadcastEnd(Message, tag="broadcast_end"):
    """The engine has queued to take all that was offered: answer once it is sent."""

    group: str
    policy_version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLeft(Message, tag="group_left"):
    """An engine will not come back to a group."""

    group: str
