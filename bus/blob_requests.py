"""Requests by which readers find servers of weights and are let in; see also `requests.py`."""

from dataclasses import dataclass, field

from bus.codec import Message
from bus.messages import BlobRef

# --- actors ask a relay ---


@dataclass(frozen=True, kw_only=True, slots=True)
class BlobAsked(Message, tag="blob_asked"):
    """A host wants a blob from a relay, which fetches it first if it does not have it."""

    blob: BlobRef


@dataclass(frozen=True, kw_only=True, slots=True)
class BlobAccess(Message, tag="blob_access"):
    """What a reader needs to be let in by a server of weights, and to know that server."""

    token: str = field(repr=False)
    """Bearer token of every request."""
    certificate: str
    """Certificate of the server, as PEM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlobOffer(Message, tag="blob_offer"):
    """The relay has the blob."""

    url: str
    """URL of the relay's server."""
    access: BlobAccess | None = None
    """What that server asks for, on a secured bus."""


# --- actors ask the learner's server of weights ---


@dataclass(frozen=True, kw_only=True, slots=True)
class BlobAccessAsked(Message, tag="blob_access_asked"):
    """A reader asks a server of weights, over a secured bus, what it needs to be let in."""
