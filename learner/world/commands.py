"""What rank 0 tells the other ranks of the learner's world, encoded as on the bus."""

from dataclasses import dataclass
from typing import Literal

from bus.codec import Message
from bus.requests import GroupRef


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetch(Message, tag="fetch"):
    """Fetch your groups of `step`; carried out at once, whatever else goes on."""

    step: int
    shares: tuple[tuple[GroupRef, ...], ...]
    """Of each data-parallel rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Train(Message, tag="train"):
    """Train on the groups of `step`."""

    step: int
    policy_version: int
    """Of the weights before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmUp(Message, tag="warm_up"):
    """Train on the `step`-th batch of demonstrations, from 0."""

    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin(Message, tag="begin"):
    """Make ready for a stage."""

    stage: Literal["warmup", "rl"]
    fresh_optimizer: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Export(Message, tag="export"):
    """Gather the weights at rank 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MakeRoom(Message, tag="make_room"):
    """Leave to others what the next step does not need of the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Save(Message, tag="save"):
    """Begin to write a checkpoint of `step`."""

    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved(Message, tag="saved"):
    """Wait until it is written, and give it its name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class End(Message, tag="end"):
    """Leave the world."""


Command = Fetch | Train | WarmUp | Begin | Export | MakeRoom | Save | Saved | End
COMMANDS: tuple[type[Message], ...] = (Fetch, Train, WarmUp, Begin, Export, MakeRoom, Save, Saved, End)
