"""Environments of OpenEnv behind a server, by its own client: with actions as text or JSON, or with tools."""

import json
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from adapter_process import Policy, Rows, seeded
from openenv.core.generic_client import GenericEnvClient

OF_TOOLS = ("Action", "CallToolAction", "ListToolsAction")
"""Names of the actions of servers whose environments offer tools (MCP)."""


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
        self._has_tools = self._schema.get("title") in OF_TOOLS
        required = self._schema.get("required", [])
        properties = self._schema.get("properties", {})
        is_text = len(required) == 1 and properties[required[0]].get("type") == "string"
        self._text_field = required[0] if is_text else None

    def rows(self, training: int, heldout: int) -> Rows:
        """Return a seed for each row, or the setting `resets`, of which a tenth is held out."""
        if self._resets is None:
            return seeded(self._url, training, heldout)
        held = max(1, len(self._resets) // 10)
        return [
            [{"prompt": f"{self._url}: {json.dumps(reset)}", "entry": reset} for reset in part]
            for part in (self._resets[held:], self._resets[:held])
        ]

    def play(self, entry: Mapping[str, Any], policy: Policy) -> Mapping[str, Any]:
        """Play until the environment is done, the turns end or the chat does; a wrong action ends it, too."""
        with GenericEnvClient(base_url=self._url).sync() as environment:
            parts = {"steps": 0.0, "invalid": 0.0}
            played = self._with_tools if self._has_tools else self._with_actions
            first = environment.reset(**entry).observation
            for number, (reward, part) in enumerate(played(environment, first, policy), start=1):
                parts[part] += reward or 0.0
                if part == "invalid" or number == self._max_turns:
                    break
        return {"reward": sum(parts.values()), "components": parts}

    def _with_actions(self, environment: Any, seen: Any, policy: Policy) -> Iterator[tuple[float, str]]:
        """Take the policy's answers for actions; yield what each gives, and as which part of the reward."""
        messages: list[Any] = []
        is_done = False
        while not is_done:
            messages.append({"role": "user", "content": self._told(seen, first=not messages)})
            answer = policy.answered(messages)
            if answer is None:
                return
            action = self._action(answer["content"] or "")
            if action is None:
                yield self._invalid, "invalid"
                return
            result = environment.step(action)
            seen, is_done = result.observation, result.done
            yield result.reward, "steps"

    def _with_tools(self, environment: Any, seen: Any, policy: Policy) -> Iterator[tuple[float, str]]:
        """Carry out the policy's calls of tools until an answer has none; yield what each gives."""
        listed = environment.step({"type": "list_tools"}).observation["tools"]
        tools = [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description", ""),
                    "parameters": tool["input_schema"],
                },
            }
            for tool in listed
        ]
        names = {tool["name"] for tool in listed}
        messages: list[Any] = [{"role": "user", "content": self._told(seen, first=False)}]
        while calls := (policy.answered(messages, tools=tools) or {}).get("tool_calls"):
            for call in calls:
                action = _call(call["function"], names)
                said = action
                if isinstance(action, dict):
                    result = environment.step(action)
                    said = _result(result.observation)
                    yield result.reward, "steps"
                    if result.done:
                        return
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})

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


def _call(function: Mapping[str, str], names: set[str]) -> dict[str, Any] | str:
    if function["name"] not in names:
        return f"error: there is no tool {function['name']!r}"
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        return f"error: the arguments are no JSON: {error}"
    if not isinstance(arguments, dict):
        return "error: the arguments are no JSON object"
    return {"type": "call_tool", "tool_name": function["name"], "arguments": arguments}


def _result(observation: Mapping[str, Any]) -> str:
    if (error := observation.get("error")) is not None:
        return f"error: {error.get('message', error)}"
    result = observation.get("result")
    if isinstance(result, dict) and result.get("data") is not None:
        result = result["data"]
    return result if isinstance(result, str) else json.dumps(result)


def open_source(name: str, settings: dict[str, Any]) -> Server:
    """Open a server: settings are `max_turns`, `invalid_reward` and `resets`."""
    return Server(name, settings)
