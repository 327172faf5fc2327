"""Games of textarena. The policy has every side, each in a chat of its own."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import textarena
from adapter_process import Policy, Rows, seeded

MOST_PLAYERS = 15
"""Most players with which a game is tried whose number is not given."""
_RESETTING = threading.Lock()
"""Held while a game begins: textarena seeds the random numbers of the whole process."""


class Games:
    """A game by its name, whose tasks are seeds."""

    def __init__(self, name: str, players: int | None, max_turns: int, settings: Mapping[str, Any]) -> None:
        self._name, self._max_turns, self._settings = name, max_turns, settings
        tried = range(1, MOST_PLAYERS + 1) if players is None else (players,)
        refused: Exception | None = None
        for self._players in tried:
            try:
                self._begun(0)
            except Exception as error:  # noqa: BLE001 - games raise what they like for a wrong number
                refused = error
            else:
                return
        raise ValueError(
            f"{name} cannot begin with {tried[0]} to {tried[-1]} players: {refused!r}"
        ) from refused

    def _begun(self, seed: int) -> Any:
        with _RESETTING:
            game = textarena.make(self._raw, **self._settings)
            game.reset(num_players=self._players, seed=seed)
        return game

    @property
    def _raw(self) -> str:
        """Return the name without wrappers, which would repeat the whole game in each observation."""
        return self._name if self._name.endswith("-raw") else f"{self._name}-raw"

    def rows(self, training: int, heldout: int) -> Rows:
        return seeded(self._name, training, heldout)

    def play(self, entry: Mapping[str, int], policy: Policy) -> Mapping[str, Any]:
        """Play until the game, the turns or a chat end; a side that wins nothing has 0."""
        game = self._begun(entry["seed"])
        chats: dict[int, list[Any]] = {side: [] for side in range(self._players)}
        for _ in range(self._max_turns):
            side, seen = game.get_observation()
            chats[side].append({"role": "user", "content": _told(side, seen)})
            answer = policy.answered(chats[side], self._agent(side))
            if answer is None or game.step(answer["content"] or "")[0]:
                break
        given = game.state.rewards or {}
        rewards = {self._agent(side): float(given.get(side, 0.0)) for side in chats}
        return {"reward": rewards, "outcome": rewards[self._agent(0)]}

    def _agent(self, side: int) -> str:
        return "player" if self._players == 1 else f"player-{side + 1}"


def _told(side: int, seen: Sequence[Any]) -> str:
    """Return what a side has not seen yet: what the game says, and what others did."""
    lines = [str(text) if who == -1 else f"[Player {who}] {text}" for who, text, _ in seen if who != side]
    return "\n".join(lines) or "Go on."


def open_source(name: str, settings: dict[str, Any]) -> Games:
    """Open a game: settings are `players`, the fewest that it takes without it, `max_turns`, and its own."""
    return Games(name, settings.pop("players", None), settings.pop("max_turns", 64), settings)
