"""Plays an environment of another package for Sluice: it runs in that package's Python, where Sluice is not.

    python adapter_process.py ADAPTER NAME SETTINGS rows TRAINING HELDOUT DIRECTORY
    python adapter_process.py ADAPTER NAME SETTINGS play EPISODES_AT_ONCE

ADAPTER is a file with a function `open_source(name, settings)`, whose result has two methods:

    rows(training, heldout)   two iterables of rows {"prompt", "label", "entry"}: so many at most
    play(entry, policy)       leads one episode; returns {"reward": number or numbers by agent, "components"}

`play` is called by many threads. What it raises fails the episode, and not this process."""

import ctypes
import importlib.util
import itertools
import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

REQUEST_TIMEOUT_S = 7200.0
WAIT_S = 30.0
REASON_CHARACTERS = 2000
PR_SET_DUMPABLE = 4
HELDOUT_SEED = 1 << 20
"""Seed of the first held-out task; those to train on count from 0."""
Rows = Sequence[Iterable[Mapping[str, Any]]]
"""Rows to train on and rows to measure with."""


class ChatEndedError(Exception):
    """The policy answers no more in this episode, such as when its context is full."""


class Source(Protocol):
    """An environment with its tasks."""

    def rows(self, training: int, heldout: int) -> Rows:
        """Return rows to train on and rows to measure with."""

    def play(self, entry: Any, policy: "Policy") -> Mapping[str, Any]:
        """Lead one episode."""


class Policy:
    """The policy in one episode."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self.openai_base_url = str(task["openai_base_url"])
        """Where a client of OpenAI's API reaches it; the address tells the episode."""
        self.key = str(task["session"])
        self._has_answered = False

    def ask(self, path: str, body: Mapping[str, Any], agent: str | None = None) -> dict[str, Any]:
        """Return what OpenAI's API answers at `path`. Raises `ChatEndedError` where the policy refuses."""
        headers = {"Authorization": f"Bearer {self.key}", **({"X-Sluice-Agent": agent} if agent else {})}
        try:
            return post(f"{self.openai_base_url}{path}", {"model": "policy", **body}, headers)
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:REASON_CHARACTERS]
            raise ChatEndedError(f"status {error.code}: {said}") from error

    def chat(self, messages: Sequence[Any], agent: str | None = None, **more: Any) -> dict[str, Any]:
        """Return the policy's next message. Raises `ChatEndedError` where there is none."""
        answer = self.ask("/chat/completions", {"messages": messages, **more}, agent)
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message

    def answered(self, messages: list[Any], agent: str | None = None, **more: Any) -> dict[str, Any] | None:
        """Return the policy's answer, which joins the messages; None where it gives none after its first."""
        try:
            answer = self.chat(messages, agent, **more)
        except ChatEndedError:
            if not self._has_answered:
                raise
            return None
        self._has_answered = True
        messages.append(answer)
        return answer


def seeded(name: str, training: int, heldout: int) -> Rows:
    """Return rows of an environment whose tasks are seeds."""
    parts = range(training), range(HELDOUT_SEED, HELDOUT_SEED + heldout)
    return [({"prompt": f"{name}, seed {seed}", "entry": {"seed": seed}} for seed in part) for part in parts]


def divided(rows: Sequence[Mapping[str, Any]], heldout: int) -> Rows:
    """Return the rows of one data set by their use: the first ones are held out, a tenth at most."""
    held = min(heldout, max(1, len(rows) // 10))
    return rows[held:], rows[:held]


def post(url: str, body: Any, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    given = {"Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(url, json.dumps(body).encode(), given)
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def opened(adapter: str, name: str, settings: str) -> Source:
    spec = importlib.util.spec_from_file_location("sluice_adapter", adapter)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sluice_adapter"], sys.modules["adapter_process"] = module, sys.modules[__name__]
    spec.loader.exec_module(module)
    source: Source = module.open_source(name, json.loads(settings))
    return source


def write_rows(source: Source, training: int, heldout: int, directory: Path) -> None:
    """Write the files of prompts. An entry becomes part of its prompt's metadata."""
    found = source.rows(training, heldout)
    for file, rows, most in zip(("prompts", "heldout"), found, (training, heldout), strict=True):
        with (directory / f"{file}.jsonl").open("w") as written:
            for row in itertools.islice(rows, most):
                kept = {"prompt": row["prompt"], "label": row.get("label")}
                metadata = {"entry": row["entry"]}
                written.write(json.dumps({**kept, "metadata": metadata}, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    """Return a number of numpy, a date or a data set's own list as JSON has it."""
    for convert in ("tolist", "isoformat", "model_dump"):
        if hasattr(value, convert):
            return getattr(value, convert)()
    raise TypeError(f"an entry holds {type(value).__name__}, which is no JSON: {str(value)[:200]}")


def play_tasks(source: Source, tasks_url: str) -> None:
    while True:
        try:
            task = post(tasks_url, {"wait_s": WAIT_S})
        except urllib.error.HTTPError as error:
            if error.code != 503:  # 503: none now
                raise
            continue
        try:
            answer = source.play(task["metadata"]["entry"], Policy(task))
            _pay(task["reward_url"], answer)
        except Exception as error:  # noqa: BLE001 - whatever an environment raises fails its own episode
            reason = f"{type(error).__name__}: {error}"[:REASON_CHARACTERS]
            print(f"episode {task['task_id']} failed: {reason}", file=sys.stderr, flush=True)  # noqa: T201
            _pay(task["end_url"], {"failed": reason})


def _pay(url: str, answer: Mapping[str, Any]) -> None:
    """Tell what came of an episode. Raises `ValueError` for what is no reward, such as NaN."""
    try:
        post(url, answer)
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")[:REASON_CHARACTERS]
        if error.code == 400:
            raise ValueError(f"{answer} is no reward: {said}") from error
        # The episode was over: it took too long, or its actor stops.
        print(f"an episode was over: status {error.code}: {said}", file=sys.stderr, flush=True)  # noqa: T201


def _keep_secrets() -> None:
    """Leave processes that run what the policy writes no way to this one's memory and standard input, which
    hold addresses of tasks and rewards."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def main(arguments: Sequence[str]) -> None:
    adapter, name, settings, what, *more = arguments
    if what == "rows":
        training, heldout, directory = more
        write_rows(opened(adapter, name, settings), int(training), int(heldout), Path(directory))
        return
    tasks_url = json.load(sys.stdin)["tasks_url"]
    _keep_secrets()
    source = opened(adapter, name, settings)
    failed: list[BaseException] = []

    def worker() -> None:
        try:
            play_tasks(source, tasks_url)
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            failed.append(error)

    for _ in range(int(more[0])):
        threading.Thread(target=worker, daemon=True).start()
    while not failed:
        time.sleep(0.2)
    print(f"cannot take tasks: {failed[0]!r}", file=sys.stderr, flush=True)  # noqa: T201 - the actor's log
    os._exit(1)  # threads of episodes may wait for what never comes


if __name__ == "__main__":
    main(sys.argv[1:])
