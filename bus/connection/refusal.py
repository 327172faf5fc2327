"""The answer to a request that cannot be served, and the exception that the asker hears it as."""

from dataclasses import dataclass
from typing import Literal

from bus.codec import Message
from bus.errors import BusError, FencedError, SluiceError, UnreadableGroupsError
from bus.jetstream import GarbledAnswerError


class GarbledRequestError(BusError):
    """The bytes of a request are none that a process of ours sends: whoever sent it asks again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused(Message, tag="refused"):
    """The request cannot be served, now or later."""

    reason: str
    code: Literal["", "fenced", "unreadable", "garbled"] = ""
    """The asker raises `FencedError`, `UnreadableGroupsError`, or `BusError` for the others; one that passes
    when it asks again for `garbled`."""
    lease_ids: tuple[int, ...] = ()
    """Leases of the groups that are `unreadable`."""

    @classmethod
    def of_error(cls, error: SluiceError) -> "Refused":
        """Return the refusal that `error` travels as."""
        if isinstance(error, FencedError):
            return cls(reason=str(error), code="fenced")
        if isinstance(error, UnreadableGroupsError):
            return cls(reason=str(error), code="unreadable", lease_ids=error.lease_ids)
        return cls(reason=str(error), code="garbled" if isinstance(error, GarbledRequestError) else "")

    def error(self, subject: str) -> SluiceError:
        """Return what the process that asked on `subject` raises."""
        reason = f"{subject}: {self.reason}"
        if self.code == "fenced":
            return FencedError(reason)
        if self.code == "unreadable":
            return UnreadableGroupsError(reason, self.lease_ids)
        refusal = BusError(reason)
        if self.code == "garbled":
            refusal.__cause__ = GarbledAnswerError(self.reason)
        return refusal
