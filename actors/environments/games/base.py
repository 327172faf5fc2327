"""Contract of text games: whose turn it is, what that player sees, and what it wins."""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Protocol, runtime_checkable

from actors.episodes.task import Task

SEED = "seed"
"""Field of a prompt's metadata that names its seed."""


def seed_of(task: Task) -> int:
    """Return the seed that the task's metadata names, or else one of its prompt: all rollouts begin alike."""
    named = task.metadata.get(SEED)
    if isinstance(named, int) and not isinstance(named, bool):
        return named
    digest = blake2b(repr(task.messages[-1].get("content")).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


class Game(Protocol):
    """One play of a game. Whatever it raises fails the episode as `environment_error`."""

    @property
    def players(self) -> int:
        """Return the number of players."""

    @property
    def player(self) -> int:
        """Return whose turn it is, from 0."""

    def observation(self) -> str:
        """Return what the player sees that it has not seen yet; its first observation contains the rules."""

    def act(self, action: str) -> bool:
        """Make the player's move, which may be any text; return whether the game has ended."""

    def rewards(self) -> Sequence[float]:
        """Return the rewards of the outcome by player, also where the game was broken off."""

    def close(self) -> None:
        """Give up what the game holds."""


@runtime_checkable
class HasScriptedPlayer(Protocol):
    """A game that can play by itself."""

    def scripted(self) -> str:
        """Return the move that it would make for the player whose turn it is."""


Start = Callable[[Task], Game]
"""Begins a game; rollouts of one prompt must begin alike, since they are compared."""
