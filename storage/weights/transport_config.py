"""Which way published weights take from the learner to the actors. Loads without torch."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from bus.config import Config


class BusTransport(Config):
    """Chunks on the run's WEIGHTS stream: needs nothing else, for models up to half a gigabyte."""

    type: Literal["bus"] = "bus"
    """Name of the transport."""


class FilesTransport(Config):
    """Files in a directory that the learner and all actors mount."""

    type: Literal["files"] = "files"
    """Name of the transport."""

    directory: Path
    """Where they lie, under the same path on every host; each run uses a directory of its own in it."""


class ServerConfig(Config):
    """A small HTTP server of a process's own."""

    host: str = "0.0.0.0"
    """Address to listen at."""

    port: int = Field(0, ge=0, le=65535)
    """Port to listen at; 0 takes any that is free."""

    advertise: str | None = Field(None, pattern=r"^https?://.+[^/]$")
    """http://host:port by which others reach it; without it, this host's address towards the bus."""


class HttpTransport(ServerConfig):
    """The learner serves files, in ranges, to actors that can reach it or a relay."""

    type: Literal["http"] = "http"
    """Name of the transport."""

    serve_from: Path | None = None
    """Where the learner keeps the files meanwhile; without it in the run's directory."""


TransportConfig = Annotated[BusTransport | HttpTransport | FilesTransport, Field(discriminator="type")]


class RelayConfig(ServerConfig):
    """How a host gets what lies behind HTTP, and whether others get it from there."""

    site: str = Field("", pattern=r"^[A-Za-z0-9_-]*$")
    """Name under which this host passes weights on; without one it does not."""

    via: str = Field("", pattern=r"^[A-Za-z0-9_-]*$")
    """Site whose hosts are asked first; without one, and where they fail, the learner is."""

    keep: int = Field(24, ge=2)
    """Blobs, deltas and whole snapshots, that a relay keeps on its disk."""

    timeout_s: float = Field(120.0, gt=0)
    """How long a relay may take to have a blob before the learner is asked instead."""

    @model_validator(mode="after")
    def _not_its_own_source(self) -> Self:
        if self.site and self.site == self.via:
            raise ValueError(f"site and via are both {self.site!r}: hosts would wait for each other")
        return self
