"""What a client and a server of sandboxes say to each other over HTTP, with `Authorization: Bearer TOKEN`.

| request | body | answer |
|---|---|---|
| `POST /sandboxes` | `{"image": NAME or null}` | 201 `{"id": ID}`; 503 where there is no room now |
| `POST /sandboxes/ID/commands` | a command | 200 with its result |
| `DELETE /sandboxes/ID` | | 204 |

A command and its result are the fields of `Command` and `CommandResult` (`base.py`), with bytes in base64.
404 says that the sandbox has ended, 502 that its host failed; each error is `{"error": WHY}`. A server ends a
sandbox that was not used for a while."""

from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import asdict
from typing import get_args

from actors.episode_sandboxes.base import Command, CommandEnd, CommandResult
from actors.episodes.task import JSON
from bus.errors import SchemaError

ENDED, FULL, FAILED = 404, 503, 502


def command_body(command: Command) -> dict[str, JSON]:
    """Return a command as JSON."""
    return {**asdict(command), "words": list(command.words), "stdin": b64encode(command.stdin).decode()}


def command_of(body: object) -> Command:
    """Return the command of a body. Raises SchemaError."""
    try:
        assert isinstance(body, Mapping)
        words, variables = body["words"], body.get("variables", {})
        return Command(
            words=tuple(str(word) for word in words),
            timeout_s=float(body["timeout_s"]),
            stdin=b64decode(str(body.get("stdin", "")), validate=True),
            output_bytes=int(body["output_bytes"]),
            directory=str(body["directory"]),
            variables={str(name): str(value) for name, value in variables.items()},
        )
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise SchemaError(f"the body is no command: {error!r}") from error


def result_body(result: CommandResult) -> dict[str, JSON]:
    """Return a result as JSON."""
    texts = {name: b64encode(getattr(result, name)).decode() for name in ("stdout", "stderr")}
    return {**asdict(result), **texts}


def result_of(body: Mapping[str, JSON]) -> CommandResult:
    """Return the result of a body. Raises SchemaError."""
    ends: Mapping[str, CommandEnd] = {end: end for end in get_args(CommandEnd)}
    try:
        return CommandResult(
            stdout=b64decode(str(body["stdout"]), validate=True),
            stderr=b64decode(str(body["stderr"]), validate=True),
            end=ends[str(body["end"])],
            status=int(str(body["status"])),
            took_s=float(str(body["took_s"])),
        )
    except (KeyError, ValueError) as error:
        raise SchemaError(f"the answer is no result of a command: {error!r}") from error
