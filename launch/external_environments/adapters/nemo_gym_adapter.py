"""Resources servers of NeMo Gym, by HTTP: each seeds an episode, carries out its tools and verifies it."""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.cookiejar import CookieJar
from itertools import islice
from pathlib import Path
from typing import Any

from adapter_process import ChatEndedError, Policy, Rows, divided


class Resources:
    """A resources server by its URL, and a file of its tasks. The reward is what it verifies."""

    def __init__(self, url: str, settings: dict[str, Any]) -> None:
        self._url = url.rstrip("/")
        self._data = Path(settings.pop("data", ""))
        self._max_turns: int = settings.pop("max_turns", 64)
        self._timeout_s: float = settings.pop("timeout_s", 600.0)
        if settings:
            raise TypeError(f"nemo_gym: no settings {', '.join(settings)}: data, max_turns, timeout_s")

    def rows(self, training: int, heldout: int) -> Rows:
        """Return the rows of the file; the first tenth of what is taken is held out."""
        if not self._data.is_file():
            raise FileNotFoundError(f"nemo_gym: the setting data names {str(self._data)!r}, which is no file")
        with self._data.open() as lines:
            found = [self._row(json.loads(one)) for one in islice(lines, training + heldout) if one.strip()]
        return divided(found, heldout)

    def _row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        asked = row["responses_create_params"]["input"]
        return {"prompt": asked if isinstance(asked, str) else json.dumps(asked), "entry": row}

    def play(self, entry: Mapping[str, Any], policy: Policy) -> Mapping[str, Any]:
        """Let the policy call tools until an answer calls none, as NeMo Gym's own agent does."""
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        self._post(opener, "/seed_session", entry)
        asked = dict(entry["responses_create_params"])
        given = asked["input"]
        start = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
        tools = {tool.get("name") for tool in asked.get("tools") or ()}
        output: list[Any] = []
        response: dict[str, Any] = {}
        for _ in range(self._max_turns):
            try:
                response = policy.ask("/responses", {**_offered(asked), "input": [*start, *output]})
            except ChatEndedError:
                if not output:
                    raise
                break
            output += response["output"]
            calls = [item for item in response["output"] if item["type"] == "function_call"]
            if not calls or response.get("incomplete_details"):
                break
            output += [self._result(opener, call, tools) for call in calls]
        verified = self._post(opener, "/verify", {**entry, "response": {**response, "output": output}})
        numbers = {k: float(v) for k, v in verified.items() if isinstance(v, bool | int | float)}
        return {"reward": numbers.pop("reward"), "components": dict(islice(numbers.items(), 64))}

    def _result(
        self, opener: urllib.request.OpenerDirector, call: Mapping[str, Any], tools: set[str | None]
    ) -> Mapping[str, Any]:
        """Return what a tool says. The policy reads what is wrong with a call, and reaches nothing else that
        the server has, such as `verify`."""
        try:
            if call["name"] not in tools:
                said = f"there is no tool {call['name']!r}"
            else:
                said = json.dumps(self._post(opener, f"/{call['name']}", json.loads(call["arguments"])))
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")
        except ValueError as error:
            said = f"the arguments are no JSON: {error}"
        return {"type": "function_call_output", "call_id": call["call_id"], "output": said}

    def _post(self, opener: urllib.request.OpenerDirector, path: str, body: Any) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}{path}", json.dumps(body).encode(), headers)
        with opener.open(request, timeout=self._timeout_s) as answer:
            return json.load(answer)


def _offered(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a request the policy is asked with; sampling is the run's."""
    return {name: asked[name] for name in ("tools", "instructions", "parallel_tool_calls") if asked.get(name)}


def open_source(name: str, settings: dict[str, Any]) -> Resources:
    """Open a server: settings are `data`, `max_turns` and `timeout_s`."""
    return Resources(name, settings)
