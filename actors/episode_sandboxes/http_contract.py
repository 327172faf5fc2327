"""What a client and a server of sandboxes say to each other over HTTP, with `Authorization: Bearer TOKEN`.

| request | body | answer |
|---|---|---|
| `POST /sandboxes` | a wish | 201 `{"id": ID, "gateway": URL}`; 503: no room now |
| `POST /sandboxes/ID/commands` | a command | 200 with its result |
| `DELETE /sandboxes/ID` | | 204 |

A wish is `{"image": NAME or null, "limits": LIMITS, "gateway": URL or null}`. LIMITS are the fields of
`SandboxLimits` (`actors/settings/episode_sandboxes.py`); lower ones of the server hold. A sandbox reaches
nothing but the server at `gateway`, by the address of the answer.

A command is a line of JSON with the fields of `Command` (`base.py`) but its `stdin`, which follows as it is.
A result is a line with those of `CommandResult`, where `stdout` and `stderr` are sizes; both follow. 404 says
that the sandbox has ended, 502 that its host failed; each error is `{"error": WHY}`. A server ends a sandbox
that was not used for a while."""

import json
from collections.abc import AsyncIterator, Mapping
from typing import get_args

from actors.episode_sandboxes.base import Command, CommandEnd, CommandResult
from actors.episodes.task import JSON
from actors.settings.episode_sandboxes import SandboxLimits
from bus.errors import SchemaError

ENDED, FULL, FAILED = 404, 503, 502
LIMITS = tuple(SandboxLimits.model_fields)
PART_BYTES = 1 << 18


def start_body(image: str | None, limits: SandboxLimits, gateway: str | None) -> bytes:
    wished = limits.model_dump(include=set(LIMITS))
    return json.dumps({"image": image, "limits": wished, "gateway": gateway}).encode()


def limits_of(body: Mapping[str, JSON], most: SandboxLimits) -> SandboxLimits:
    """Return the limits of a body, and `most` where those are higher or missing. Raises ValueError."""
    asked = body.get("limits")
    given = asked if isinstance(asked, Mapping) else {}
    wished = SandboxLimits.model_validate({name: getattr(most, name) for name in LIMITS} | {**given})
    return SandboxLimits(**{name: min(getattr(wished, name), getattr(most, name)) for name in LIMITS})


async def in_parts(*whole: bytes) -> AsyncIterator[bytes]:
    """Yield bytes in parts that do not hold up who sends them."""
    for one in whole:
        for start in range(0, len(one), PART_BYTES):
            yield one[start : start + PART_BYTES]


def command_line(command: Command) -> bytes:
    """Return a command as its line, which its standard input follows."""
    fields = {
        "words": list(command.words), "timeout_s": command.timeout_s, "output_bytes": command.output_bytes,
        "directory": command.directory, "variables": dict(command.variables),
    }  # fmt: skip
    return json.dumps(fields).encode() + b"\n"


def command_of(body: bytes) -> Command:
    """Return the command of a body. Raises SchemaError."""
    line, _, stdin = body.partition(b"\n")
    try:
        fields = json.loads(line)
        return Command(
            words=tuple(str(word) for word in fields["words"]),
            timeout_s=float(fields["timeout_s"]),
            stdin=stdin,
            output_bytes=int(fields["output_bytes"]),
            directory=str(fields["directory"]),
            variables={str(name): str(value) for name, value in fields.get("variables", {}).items()},
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SchemaError(f"the body is no command: {error!r}") from error


def result_line(result: CommandResult) -> bytes:
    """Return a result as its line, which its output and errors follow."""
    fields = {
        "end": result.end, "status": result.status, "took_s": result.took_s, "stdout": len(result.stdout),
        "stderr": len(result.stderr),
    }  # fmt: skip
    return json.dumps(fields).encode() + b"\n"


def result_of(body: bytes) -> CommandResult:
    """Return the result of a body. Raises SchemaError."""
    ends: Mapping[str, CommandEnd] = {end: end for end in get_args(CommandEnd)}
    line, _, outputs = body.partition(b"\n")
    try:
        fields = json.loads(line)
        size = int(fields["stdout"])
        if len(outputs) != size + int(fields["stderr"]):
            raise SchemaError(
                f"the answer has {len(outputs)} bytes of output, and says other sizes: {fields}"
            )
        return CommandResult(
            stdout=outputs[:size],
            stderr=outputs[size:],
            end=ends[str(fields["end"])],
            status=int(fields["status"]),
            took_s=float(fields["took_s"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SchemaError(f"the answer is no result of a command: {error!r}") from error
