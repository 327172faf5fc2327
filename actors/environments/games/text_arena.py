"""Games of the package textarena, which this module imports."""

import threading
from collections.abc import Sequence

import textarena

from actors.environments.games.base import Start, seed_of
from actors.settings.games import TextArenaGame
from bus.errors import ConfigError

_RESETTING = threading.Lock()
"""Held while a game begins: textarena seeds the random numbers of the whole process."""


class TextArenaPlay:
    """One play of a game of textarena, whose rewards are those that it gives at the end."""

    def __init__(self, game: TextArenaGame, seed: int) -> None:
        self.players = game.players
        self._env = textarena.make(game.id, **game.settings)
        with _RESETTING:
            self._env.reset(num_players=game.players, seed=seed)

    @classmethod
    def checked_start(cls, game: TextArenaGame) -> Start:
        """Return what begins the game. Raises ConfigError for a game that textarena cannot begin."""
        try:
            cls(game, 0)
        except Exception as error:  # games raise what they like: unknown names, wrong numbers of players, ...
            raise ConfigError(
                f"actors.environment.game: textarena cannot begin {game.id!r} with {game.players} players: "
                f"{type(error).__name__}: {error}"
            ) from error
        return lambda task: cls(game, seed_of(task))

    @property
    def player(self) -> int:
        """Return whose turn it is."""
        return int(self._env.state.current_player_id)

    def observation(self) -> str:
        """Return what the player has not seen yet: the rules first, then what others did."""
        _, seen = self._env.get_observation()
        return str(seen)

    def act(self, action: str) -> bool:
        """Make a move; return whether the game has ended."""
        done, _ = self._env.step(action=action)
        return bool(done)

    def rewards(self) -> Sequence[float]:
        """Return the rewards by player; 0 for a game that was broken off."""
        given = self._env.state.rewards or {}
        return [float(given.get(player, 0.0)) for player in range(self.players)]

    def close(self) -> None:
        """Do nothing: games hold no more than memory."""
