"""Environments of gymnasium with numbered actions, or with texts: the policy writes what it does."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
from adapter_process import Policy, Rows, seeded


class Steps:
    """An environment by its id, whose tasks are seeds. The reward is the sum over its steps."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self._name = name
        self._words: Sequence[str] = settings.pop("actions", ())
        self._about: str = settings.pop("introduction", f"You are in the environment {name}.")
        self._max_turns: int = settings.pop("max_turns", 64)
        self._invalid: float = settings.pop("invalid_reward", -1.0)
        self._settings = settings
        env = self._made()
        space = env.action_space
        env.close()
        self._count = 0 if isinstance(space, gymnasium.spaces.Text) else int(getattr(space, "n", -1))
        self._first = int(getattr(space, "start", 0))
        if self._count < 0:
            raise TypeError(f"{name}: its actions are {space}: numbered ones and texts can be written")

    def _made(self) -> Any:
        return gymnasium.make(self._name, **self._settings)

    def rows(self, training: int, heldout: int) -> Rows:
        return seeded(self._name, training, heldout)

    def play(self, entry: Mapping[str, int], policy: Policy) -> Mapping[str, Any]:
        """Play until the episode, the turns or the chat end; what names no action ends it, too."""
        env = self._made()
        try:
            return self._played(env, entry["seed"], policy)
        finally:
            env.close()

    def _played(self, env: Any, seed: int, policy: Policy) -> Mapping[str, Any]:
        seen, _ = env.reset(seed=seed)
        messages: list[Any] = [{"role": "user", "content": f"{self._about}\n{self._rules}\n{seen}"}]
        parts = {"steps": 0.0, "invalid": 0.0}
        for _ in range(self._max_turns):
            if (answer := policy.answered(messages)) is None:
                break
            action = self._action(answer["content"] or "")
            if action is None:
                parts["invalid"] = self._invalid
                break
            seen, reward, terminated, truncated, _ = env.step(action)
            parts["steps"] += float(reward)
            if terminated or truncated:
                break
            messages.append({"role": "user", "content": str(seen)})
        return {"reward": sum(parts.values()), "components": parts}

    @property
    def _rules(self) -> str:
        if not self._count:
            return "Answer with the text of your action."
        named = ", ".join(f"{self._first + n} ({word})" for n, word in enumerate(self._words))
        last = self._first + self._count - 1
        return f"Answer with the number of your action alone: {named or f'{self._first} to {last}'}."

    def _action(self, text: str) -> int | str | None:
        """Return the action that a text names: by its word, or the last number in it."""
        if not self._count:
            return text
        if (word := text.strip()) in self._words:
            return self._first + list(self._words).index(word)
        numbers = re.findall(r"-?\d{1,6}", text, re.ASCII)
        number = int(numbers[-1]) if numbers else self._first - 1
        return number if 0 <= number - self._first < self._count else None


def open_source(name: str, settings: dict[str, Any]) -> Steps:
    """Open an environment: settings are `introduction`, `actions`, `max_turns`, `invalid_reward`, and what
    the environment itself takes."""
    return Steps(name, settings)
