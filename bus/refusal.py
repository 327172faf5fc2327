"""The answer to a request that cannot be served, and the exception that the asker hears it as."""

from dataclasses import dataclass
from typing import Literal

from bus.codec import Message
from bus.errors import BusError, FencedError, SluiceError, UnreadableGroupsError


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused(Message, tag="refused"):
    """The request cannot be served, now or later."""

    reason: str
    code: Literal["", "fenced", "unreadable"] = ""
    """The asker raises `FencedError`, `UnreadableGroupsError`, or `BusError` for the empty code."""
    lease_ids: tuple[int, ...] = ()
    """Leases of the groups that are `unreadable`."""

    @classmethod
    def of_error(cls, error: SluiceError) -> "Refused":
        """Return the refusal that `error` travels as."""
        if isinstance(error, FencedError):
            return cls(reason=str(error), code="fenced")
        if isinstance(error, UnreadableGroupsError):
            return cls(reason=str(error), code="unreadable", lease_ids=error.lease_ids)
        return cls(reason=str(error))

    def error(self, subject: str) -> SluiceError:
        """Return what the process that asked on `subject` raises."""
        reason = f"{subject}: {self.reason}"
        if self.code == "fenced":
            return FencedError(reason)
        if self.code == "unreadable":
            return UnreadableGroupsError(reason, self.lease_ids)
        return BusError(reason)
