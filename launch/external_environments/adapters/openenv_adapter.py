"""Environments of OpenEnv behind a server, by its own client."""

import json
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from adapter_process import ChatEndedError, Policy
from openenv.core.generic_client import GenericEnvClient

HELDOUT_SEED = 1 << 20
"""Seed of the first held-out task; those to train on count from 0."""


class Server:
    """A server by its URL, whose tasks are arguments of `reset`. The reward is the sum over all steps."""

    def __init__(self, url: str, settings: dict[str, Any]) -> None:
        self._url = url.rstrip("/")
        self._max_turns: int = settings.pop("max_turns", 64)
        self._invalid: float = settings.pop("invalid_reward", 0.0)
        self._resets: Sequence[Mapping[str, Any]] | None = settings.pop("resets", None)
        if settings:
            raise TypeError(f"openenv: no settings {', '.join(settings)}: max_turns, invalid_reward, resets")
        with urllib.request.urlopen(f"{self._url}/schema", timeout=60) as answer:
            self._schema: Mapping[str, Any] = json.load(answer)["action"]
        required = self._schema.get("required", [])
        properties = self._schema.get("properties", {})
        is_text = len(required) == 1 and properties[required[0]].get("type") == "string"
        self._text_field = required[0] if is_text else None

    def rows(self, training: int, heldout: int) -> Sequence[Iterator[Mapping[str, Any]]]:
        """Return a seed for each row, or the setting `resets`, of which a tenth is held out."""
        if self._resets is None:
            seeds = range(training), range(HELDOUT_SEED, HELDOUT_SEED + heldout)
            found: Any = tuple([{"seed": seed} for seed in part] for part in seeds)
        else:
            held = max(1, len(self._resets) // 10)
            found = self._resets[held:], self._resets[:held]
        return tuple(map(self._row, part) for part in found)

    def _row(self, reset: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"prompt": f"{self._url}: {json.dumps(reset)}", "entry": reset}

    def play(self, entry: Mapping[str, Any], policy: Policy) -> Mapping[str, Any]:
        """Play until the environment is done, the turns end or the chat does; a wrong action ends it, too."""
        messages: list[Any] = []
        parts = {"steps": 0.0, "invalid": 0.0}
        with GenericEnvClient(base_url=self._url).sync() as environment:
            result = environment.reset(**entry)
            for _ in range(self._max_turns):
                messages.append(
                    {"role": "user", "content": self._told(result.observation, first=not messages)}
                )
                try:
                    answer = policy.chat(messages)
                except ChatEndedError:
                    if len(messages) == 1:
                        raise
                    break
                messages.append(answer)
                action = self._action(answer["content"] or "")
                if action is None:
                    parts["invalid"] = self._invalid
                    break
                result = environment.step(action)
                parts["steps"] += result.reward or 0.0
                if result.done:
                    break
        return {"reward": sum(parts.values()), "components": parts}

    def _told(self, observation: Mapping[str, Any], *, first: bool) -> str:
        """Return an observation as text: its one text, or else all of it as JSON."""
        kept = {
            k: v for k, v in observation.items() if k not in ("done", "reward", "metadata") and v is not None
        }
        texts = list(kept.values())
        said = texts[0] if len(texts) == 1 and isinstance(texts[0], str) else json.dumps(kept)
        if not first or self._text_field is not None:
            return said
        return f"{said}\nAnswer with one JSON object that fits this schema: {json.dumps(self._schema)}"

    def _action(self, text: str) -> dict[str, Any] | None:
        """Return the action that an answer is, or None where it is none."""
        if self._text_field is not None:
            return {self._text_field: text}
        try:
            found = json.loads(text.strip().removeprefix("```json").strip("`").strip())
        except ValueError:
            return None
        return found if isinstance(found, dict) else None


def open_source(name: str, settings: dict[str, Any]) -> Server:
    """Open a server: settings are `max_turns`, `invalid_reward` and `resets`."""
    return Server(name, settings)
