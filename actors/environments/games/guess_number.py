"""A number is guessed, by the answers higher and lower."""

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
        """Return the prompt, or what the guess before was."""
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
        """Return whether the number was found."""
        return (float(self._won),)

    def close(self) -> None:
        """Do nothing: nothing is open."""
