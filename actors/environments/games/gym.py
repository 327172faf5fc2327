"""Environments of the package gymnasium with numbered actions, which this module imports."""

import re
from collections.abc import Sequence
from typing import Any

import gymnasium

from actors.environments.games.base import Start, seed_of
from actors.settings.games import GymnasiumGame
from bus.errors import ConfigError


class GymnasiumPlay:
    """One episode of an environment, whose reward is the sum of what it gives at its steps. A text that names
    no action ends the episode with what was won so far less 1."""

    players = 1
    player = 0

    def __init__(self, game: GymnasiumGame, seed: int, introduction: str) -> None:
        settings: dict[str, Any] = dict(game.settings)
        self._env: Any = gymnasium.make(game.id, **settings)
        space = self._env.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            self._env.close()
            raise TypeError(f"its actions are {space}, not numbered ones")
        self._first, self._count = int(space.start), int(space.n)
        self._words = {word: self._first + n for n, word in enumerate(game.actions)}
        seen, _ = self._env.reset(seed=seed)
        self._observation = f"{introduction}\n{seen}" if introduction else str(seen)
        self._total = 0.0

    @classmethod
    def checked_start(cls, game: GymnasiumGame) -> Start:
        """Return what begins the game. Raises ConfigError for an environment that cannot be played here."""
        try:
            cls(game, 0, "").close()
        except Exception as error:  # environments raise what they like: unknown names, missing libraries, ...
            raise ConfigError(
                f"actors.environment.game: gymnasium cannot begin {game.id!r}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return lambda task: cls(game, seed_of(task), str(task.messages[-1]["content"]))

    def observation(self) -> str:
        """Return the state, after the task's text at first."""
        return self._observation

    def act(self, action: str) -> bool:
        """Take the step of an action's word or number; return whether the episode has ended."""
        number = self._number(action.strip())
        if number is None:
            self._total -= 1.0
            return True
        seen, reward, terminated, truncated, _ = self._env.step(number)
        self._observation = str(seen)
        self._total += float(reward)
        return bool(terminated or truncated)

    def rewards(self) -> Sequence[float]:
        return (self._total,)

    def close(self) -> None:
        self._env.close()

    def _number(self, action: str) -> int | None:
        if action in self._words:
            return self._words[action]
        number = int(action) if re.fullmatch(r"-?\d{1,6}", action, re.ASCII) else None
        return number if number is not None and 0 <= number - self._first < self._count else None
