"""Requests that the gateway answers with an error; each API has a shape of its own for it."""

from bus.errors import SluiceError


class RefusedError(SluiceError):
    """A request is not served; its session is as it was before."""

    def __init__(self, status: int, code: str, reason: str, *, retry: bool = False) -> None:
        super().__init__(reason)
        self.status = status
        """HTTP status."""
        self.code = code
        """Word for programs, such as `turn_limit`."""
        self.retry = retry
        """Whether the same request may succeed later."""


def invalid(reason: str) -> RefusedError:
    """Return the refusal of a request that can never be served."""
    return RefusedError(400, "invalid_request", reason)
