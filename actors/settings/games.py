"""Settings of text games. Loads without torch, and without the libraries that games come from."""

import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from actors.settings.environment import EnvironmentSettings
from actors.settings.rewards import UnfinishedConfig
from bus.config import Config

SELF, SCRIPTED = "self", "scripted"
LOST = -1.0
"""Reward of a player that loses, in the games that give less than 0."""


class GuessNumber(Config):
    """One player guesses a number that is told to be higher or lower. The task names it as its label."""

    type: Literal["guess_number"] = "guess_number"
    guesses: int = Field(4, ge=1)
    """Most guesses; the reward is 1 when one of them is right."""


class Nim(Config):
    """Two players take sticks from a pile in turn, at least one; whoever takes the last one wins.

    The task's prompt ends with the size of the pile and the most sticks that a move takes, as `nim 17 3`."""

    type: Literal["nim"] = "nim"


class LibraryGame(Config):
    """Base of games that come from a library."""

    id: str
    """Name of the game in its library, as `KuhnPoker-v0` or `Blackjack-v1`."""
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    """Further arguments of the library's function `make`."""


class TextArenaGame(LibraryGame):
    """A game of the package textarena."""

    type: Literal["textarena"]
    players: int = Field(1, ge=1)
    """Number of players."""


class GymnasiumGame(LibraryGame):
    """An environment of the package gymnasium whose actions are numbered; the policy writes the number."""

    type: Literal["gymnasium"]
    actions: tuple[str, ...] = ()
    """Words for the actions from the first on, which the policy may write instead of numbers."""


class PluginGame(Config):
    """A game of the user's own."""

    type: Literal["plugin"]
    start: str
    """Function that begins it, as `my_pkg.my_module:function`; it takes a task and returns a `Game`."""


AnyGame = Annotated[
    GuessNumber | Nim | TextArenaGame | GymnasiumGame | PluginGame, Field(discriminator="type")
]


class GameConfig(EnvironmentSettings, UnfinishedConfig):
    """Environment in which policies play a text game over several turns, with rewards at its end."""

    type: Literal["game"] = "game"
    built_by: ClassVar[str] = "actors.environments.games.environment:GameEnvironment.from_config"
    shows_tools: ClassVar[bool] = False
    has_own_rewards: ClassVar[bool] = True
    game: AnyGame = GuessNumber()
    """What is played."""
    opponent: str = SELF
    """Who plays against the policy. `self`: the policy has all sides, and is trained on all of them.
    `scripted`: the game's own player. Any other name is one of `actors.opponents`, whose side is not trained,
    or of `policies`, whose side is.
    Against an opponent the policy's side changes from one rollout of a prompt to the next."""
    heldout_opponent: str | None = None
    """The same for held-out tasks, in which the policy has the first side. `None` takes `opponent`."""
    game_turns: int = Field(32, ge=1)
    """Most turns of a game, of all players together; then it ends as `turn_limit` without a winner."""
    game_timeout_s: float = Field(600.0, gt=0)
    """Longest time of an episode."""

    @property
    def lowest(self) -> float | None:
        """Return the reward of a player whose move makes the game fail; None where the episode has none."""
        return self.lowered(LOST)

    @property
    def agent_names(self) -> tuple[str, ...] | None:
        """Return the names of the players; None for a game of the user's own."""
        count = {"guess_number": 1, "nim": 2, "gymnasium": 1}.get(self.game.type)
        if isinstance(self.game, TextArenaGame):
            count = self.game.players
        if count is None:
            return None
        return ("player",) if count == 1 else tuple(f"player-{n + 1}" for n in range(count))

    def lets_opponent_play(self, agent: str) -> bool:
        return re.fullmatch(r"player(-\d+)?", agent) is not None

    @property
    def opponents_named(self) -> tuple[str, ...]:
        named = {self.opponent, self.heldout_opponent or self.opponent}
        return tuple(sorted(named - {SELF, SCRIPTED}))

    @model_validator(mode="after")
    def _a_scripted_player_exists(self) -> Self:
        if SCRIPTED in (self.opponent, self.heldout_opponent) and self.game.type in (
            "guess_number", "textarena", "gymnasium",
        ):  # fmt: skip
            raise ValueError(
                f'opponent "{SCRIPTED}": {self.game.type} has no player of its own: name one of '
                f'actors.opponents, or set "{SELF}"'
            )
        return self
