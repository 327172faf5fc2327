"""Settings of the transport of published weights to the actors. Loads without torch."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from bus.config import Config


class BusTransport(Config):
    """Chunks on the run's WEIGHTS stream, which need nothing else, for models up to a fourth of its bytes."""

    type: Literal["bus"] = "bus"


class FilesTransport(Config):
    """Files in a directory that the learner and all actors mount."""

    type: Literal["files"] = "files"

    directory: Path
    """Directory with the same path on every host; each run uses a subdirectory of it."""


class ServerConfig(Config):
    """HTTP server that a process runs for blobs."""

    host: str = ""
    """Address to listen at. Without one it is the address that this host has towards the bus."""

    port: int = Field(0, ge=0, le=65535)
    """Port to listen at; 0 takes any that is free."""

    advertise: str | None = Field(None, pattern=r"^https?://.+[^/]$")
    """URL by which others reach it, as http://host:port. Without it they use this host's address towards the
    bus."""


class LearnerServer(ServerConfig):
    """HTTP server of the learner."""

    serve_from: Path | None = None
    """Directory of the files that the learner serves; without it they are in the run's directory."""


class HttpTransport(LearnerServer):
    """The learner serves files, in ranges, to actors that can reach it or a relay."""

    type: Literal["http"] = "http"


class AutoTransport(LearnerServer):
    """The bus for a model that leaves room for several versions on the stream WEIGHTS, else HTTP.

    The learner chooses by the size of the published weights when it starts. The other settings are those of
    HTTP."""

    type: Literal["auto"] = "auto"

    def chosen(self, size_bytes: int, stream_bytes: int) -> BusTransport | HttpTransport:
        """Return the transport for weights of `size_bytes`, where the stream WEIGHTS holds `stream_bytes`; 0
        means any number of bytes."""
        if fits_stream(size_bytes, stream_bytes):
            return BusTransport()
        return HttpTransport(**self.model_dump(exclude={"type"}))


SHARE = 4
"""One blob may take a fourth of the stream, which holds several snapshots and all deltas at a time."""


def fits_stream(size_bytes: int, stream_bytes: int) -> bool:
    """Return whether the stream WEIGHTS of `stream_bytes` (0: unlimited) has room for blobs of this size."""
    return not 0 < stream_bytes < SHARE * size_bytes


ChosenTransport = BusTransport | HttpTransport | FilesTransport
TransportConfig = Annotated[
    AutoTransport | BusTransport | HttpTransport | FilesTransport, Field(discriminator="type")
]


class RelayConfig(ServerConfig):
    """How a host fetches weights over HTTP, and whether it serves them to others."""

    site: str = Field("", pattern=r"^[A-Za-z0-9_-]*$")
    """Site for which this host relays weights; without one it does not relay."""

    via: str = Field("", pattern=r"^[A-Za-z0-9_-]*$")
    """Site whose relays are asked first. Without one, and where they fail, the learner is asked."""

    keep: int = Field(24, ge=2)
    """Number of blobs, deltas and snapshots, that a relay keeps on its disk."""

    keep_bytes: int = Field(32 << 30, ge=1)
    """Bytes of blobs that a relay keeps on its disk; the oldest go first. A larger blob is not relayed: the
    learner serves it. Allow for two snapshots of the model."""

    directory: Path | None = None
    """Directory in which a relay keeps them, in a subdirectory that is removed when it ends. Without one it
    is the system's directory for temporary files."""

    timeout_s: float = Field(120.0, gt=0)
    """Longest time that a relay may take to get a blob before the learner is asked instead."""

    @model_validator(mode="after")
    def _not_its_own_source(self) -> Self:
        if self.site and self.site == self.via:
            raise ValueError(f"site and via are both {self.site!r}: hosts would wait for each other")
        return self
