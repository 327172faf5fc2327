"""Games that come with Sluice: guessing a number, and Nim, whose play can be measured against perfection."""

import re
from collections.abc import Sequence

from actors.episodes.errors import EpisodeError
from actors.episodes.task import Task


class GuessNumberPlay:
    """One play: 1 for a right guess within the limit, else 0."""

    players = 1
    player = 0

    def __init__(self, prompt: str, number: int, guesses: int) -> None:
        self._told = prompt
        self._number = number
        self._left = guesses
        self._won = False

    @classmethod
    def begin(cls, task: Task, *, guesses: int) -> "GuessNumberPlay":
        """Begin with the number in the task's label. Raises EpisodeError if there is none."""
        if task.label is None or not (task.label.isascii() and task.label.isdecimal()):
            raise EpisodeError(f"task {task.task_id}: its label is {task.label!r}: give the number to guess")
        return cls(str(task.messages[-1]["content"]), int(task.label), guesses)

    def observation(self) -> str:
        return self._told

    def act(self, action: str) -> bool:
        """Guess; a text that is no number costs a guess too."""
        self._left -= 1
        guess = action.strip()
        if not (guess.isascii() and guess.isdecimal()):
            self._told = "not a number"
        elif int(guess) == self._number:
            self._won = True
        else:
            self._told = "higher" if int(guess) < self._number else "lower"
        return self._won or not self._left

    def rewards(self) -> Sequence[float]:
        return (float(self._won),)

    def close(self) -> None:
        """Do nothing: nothing is open."""


START = re.compile(r"(\d{1,4}) (\d{1,4})\s*$")


class NimPlay:
    """One play: the winner has 1, the loser 0; a move that the rules do not allow loses."""

    players = 2

    def __init__(self, rules: str, pile: int, most: int) -> None:
        self.player = 0
        self._rules = [rules, rules]
        self._pile = pile
        self._most = most
        self._winner: int | None = None

    @classmethod
    def begin(cls, task: Task) -> "NimPlay":
        """Begin with the pile and the limit of a move in the prompt. Raises EpisodeError if they are not
        there."""
        prompt = str(task.messages[-1]["content"])
        found = START.search(prompt)
        if found is None or not int(found[1]) or not int(found[2]):
            raise EpisodeError(
                f"task {task.task_id}: the prompt {prompt!r} is to end with the pile and the most sticks "
                "that a move takes, as `nim 17 3`"
            )
        return cls(prompt[: found.start()], int(found[1]), int(found[2]))

    def observation(self) -> str:
        """Return the pile and the limit, and before a player's first move what the prompt says."""
        rules, self._rules[self.player] = self._rules[self.player], ""
        return f"{rules}{self._pile} {self._most}"

    def act(self, action: str) -> bool:
        """Take sticks; return whether that has decided the game."""
        text = action.strip()
        taken = int(text) if re.fullmatch(r"\d{1,4}", text, re.ASCII) else 0
        if not 1 <= taken <= min(self._most, self._pile):
            self._winner = 1 - self.player
        else:
            self._pile -= taken
            if not self._pile:
                self._winner = self.player
        self.player = 1 - self.player
        return self._winner is not None

    def rewards(self) -> Sequence[float]:
        """Return 1 for the winner and 0 for the loser; 0 for both where there is none."""
        return [float(self._winner == player) for player in range(2)]

    def scripted(self) -> str:
        """Return the perfect move, which leaves a multiple of the limit and one; where there is none, 1."""
        return str(self._pile % (self._most + 1) or 1)

    def close(self) -> None:
        """Do nothing: nothing is open."""
