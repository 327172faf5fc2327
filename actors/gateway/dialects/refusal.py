"""Requests that the gateway answers with an error; each API has a shape of its own for it."""

import re
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from bus.errors import SluiceError

B = TypeVar("B", bound=BaseModel)
FORM = re.compile(r"str$|constrained-str$|list\[")
"""How pydantic names the forms of a field in the place of an error."""


class RefusedError(SluiceError):
    """A request is not served; its session is as it was before."""

    def __init__(self, status: int, code: str, reason: str, *, retry: bool = False) -> None:
        super().__init__(reason)
        self.status = status
        self.code = code
        """Word for programs, such as `turn_limit`."""
        self.retry = retry
        """Whether the same request may succeed later."""


class TooLongError(RefusedError):
    """The prompt of a request leaves no room for an answer. Each API has words of its own for it, by which
    agents know that they are to shorten their history."""

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(
            400, "context_length_exceeded",
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in "
            f"{tokens} tokens. Please reduce the length of the messages.",
        )  # fmt: skip
        self.tokens = tokens
        self.limit = limit


def invalid(reason: str) -> RefusedError:
    """Return the refusal of a request that can never be served."""
    return RefusedError(400, "invalid_request", reason)


def parsed(kind: type[B], raw: bytes) -> B:
    """Read a body of JSON. Raises `RefusedError`, which names the field that is wrong."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        first = max(found, key=lambda one: len(one["loc"]))  # of a field's forms, the one that was meant
        where = ".".join(str(part) for part in first["loc"] if not FORM.match(str(part)))
        raise invalid(f"{where}: {first['msg']}" if where else first["msg"]) from error
