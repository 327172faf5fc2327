"""Requests of clients that open sessions themselves: for a task, and for the end of its episode."""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Annotated

from pydantic import Field, JsonValue

from actors.episodes.task import JSON, Task
from actors.gateway.dialects.base import Body
from actors.gateway.dialects.refusal import invalid, parsed
from actors.gateway.task_offers import OwnTask
from bus.errors import SchemaError

MOST_WAIT_S = 300.0


class _Own(Body):
    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[dict[str, JsonValue]], Field(min_length=1)]
    name: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    label: str | None = None
    metadata: Mapping[str, JsonValue] = {}


class _TaskRequest(Body):
    wait_s: Annotated[float, Field(ge=0, le=MOST_WAIT_S)] = 30.0
    task: _Own | None = None


class _End(Body):
    failed: Annotated[str | None, Field(min_length=1, max_length=4096)] = None


def task_request(raw: bytes) -> tuple[OwnTask | None, float]:
    """Read what a client asks for: a task of its own or any, and how long it waits. Raises `RefusedError`."""
    asked = parsed(_TaskRequest, raw or b"{}")
    if asked.task is None:
        return None, asked.wait_s
    given = asked.task
    digest = blake2b(given.model_dump_json(include={"prompt", "label"}).encode(), digest_size=8).hexdigest()
    task = Task(task_id="own", prompt=given.prompt, label=given.label, metadata=given.metadata)
    try:
        task.messages  # noqa: B018 - it raises for what is no chat
    except SchemaError as error:
        raise invalid(str(error)) from error
    return OwnTask(given.name or digest, task), asked.wait_s


def failure_of(raw: bytes) -> str | None:
    """Read the end of an episode: why it failed, or None. Raises `RefusedError`."""
    return parsed(_End, raw or b"{}").failed


def described(task: Mapping[str, JSON], url: str, key: str, reward_url: str) -> dict[str, JSON]:
    """Return what a client gets: the task, where its session is reached, and where its reward is posted."""
    return {
        **task,
        "session": key,
        "base_url": url,
        "openai_base_url": f"{url}/v1",
        "reward_url": reward_url,
        "end_url": f"{reward_url}/end",
    }
