"""Settings of the transport of published weights to the actors. Loads without torch."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import Field

from bus.config import Config
from bus.errors import ConfigError

LARGEST_PORT = 65535
HOST = "{host}"
"""Stands in `advertise` for the name of a process's own host."""
SHARE = 4
"""One blob may take a fourth of the stream, which holds several snapshots and all deltas at a time."""


class Transport(Config):
    """Settings of a transport, whose class is its record; the defaults hold for one whose blobs stay where
    they are when the learner ends."""

    type: str
    opened_by: ClassVar[str]
    """What returns the store of a rank of the learner (`storage.weights.blob_stores.BlobStore`) from the bus,
    these settings, the run's own directory for served files and the rank, as `module:function`."""
    fetched_by: ClassVar[str]
    """What fetches the bytes behind a reference, from the bus and the reference, as `module:function`."""
    schemes: ClassVar[tuple[str, ...]] = ()
    """Schemes of the URLs, in references, that it fetches from."""
    shared: ClassVar[bool] = False
    """Hosts pass parts on to each other."""
    served_by_learner: ClassVar[bool] = False
    """Nobody can fetch any more when the learner has ended."""

    @property
    def lasting(self) -> "Transport":
        """Return what the learner of a further policy takes, whose weights are fetched after its end."""
        return self

    def fits(self, size_bytes: int, stream_bytes: int) -> bool:
        """Return whether weights of this size can go this way, where the stream WEIGHTS holds `stream_bytes`;
        0 means any number of bytes."""
        return True

    def chosen(self, size_bytes: int, stream_bytes: int) -> "Transport":
        """Return the transport for weights of this size; the bytes are as `fits` takes them."""
        return self


class BusTransport(Transport):
    """Chunks on the run's WEIGHTS stream, which need nothing else, for models up to a fourth of its bytes."""

    type: Literal["bus"] = "bus"
    opened_by: ClassVar[str] = "storage.weights.blob_stores:bus_blobs"
    fetched_by: ClassVar[str] = "bus.streams.blob_store:get_blob"
    schemes: ClassVar[tuple[str, ...]] = ("",)

    def fits(self, size_bytes: int, stream_bytes: int) -> bool:
        """Return whether the stream has room for several of them."""
        return not 0 < stream_bytes < SHARE * size_bytes


class FilesTransport(Transport):
    """Files in a directory that the learner and all actors mount."""

    type: Literal["files"] = "files"
    opened_by: ClassVar[str] = "storage.weights.blob_stores:file_blobs"
    fetched_by: ClassVar[str] = "storage.weights.blob_files:fetch_file"
    schemes: ClassVar[tuple[str, ...]] = ("file",)
    directory: Path
    """Directory with the same path on every host; each run uses a subdirectory of it."""


class ServerConfig(Config):
    """HTTP server that a process runs for blobs."""

    host: str = ""
    """Address to listen at. Without one it is the address that this host has towards the bus."""
    port: int = Field(0, ge=0, le=LARGEST_PORT)
    """Port to listen at; 0 takes any that is free."""
    advertise: str | None = Field(None, pattern=r"^https?://.+[^/]$")
    """URL by which others reach it, as http://host:port. `{host}` in it stands for the name of this process's
    host, as in http://{host}.example:9000. Without it they use this host's address towards the bus."""
    bytes_per_s: int | None = Field(None, ge=1)
    """Bound on the bandwidth with which the server sends. `None` sets none."""


class LearnerServer(ServerConfig):
    """HTTP server of each rank of the learner. Rank N listens at `port` + N, if that is not 0, and is
    reached at the port of `advertise` + N."""

    serve_from: Path | None = None
    """Directory of the files that the learner serves; without it they are in the run's directory."""

    def of_rank(self, rank: int) -> Self:
        """Return the settings of a rank's server. Raises `ConfigError` where its port cannot be."""
        if not rank:
            return self
        port, url = self.port and self.port + rank, self.advertise
        if port > LARGEST_PORT:
            raise ConfigError(
                f"learner.publication.transport.port={self.port}: rank N of the learner listens at it + N, "
                f"which is {port} for the last one: set a lower port, or 0 for any that is free"
            )
        if url is not None:
            begin, _, end = url.rpartition(":")
            if not end.isdecimal() or int(end) + rank > LARGEST_PORT:
                raise ConfigError(
                    f"learner.publication.transport.advertise={url}: rank N of the learner is reached at its "
                    f"port + N: end it with the port of rank 0, such that the last is at most {LARGEST_PORT}"
                )
            url = f"{begin}:{int(end) + rank}"
        return self.model_copy(update={"port": port, "advertise": url})


class HttpTransport(LearnerServer, Transport):
    """The learner serves files, in ranges, to actors, which pass parts on to each other."""

    type: Literal["http"] = "http"
    opened_by: ClassVar[str] = "storage.weights.blob_stores:http_blobs"
    fetched_by: ClassVar[str] = "storage.weights.blob_http:fetch_served"
    schemes: ClassVar[tuple[str, ...]] = ("http", "https")
    shared: ClassVar[bool] = True
    served_by_learner: ClassVar[bool] = True


class AutoTransport(LearnerServer, Transport):
    """The bus for a model that leaves room for several versions on the stream WEIGHTS, else HTTP.

    The learner chooses by the size of the published weights when it starts. The other settings are those of
    HTTP."""

    type: Literal["auto"] = "auto"

    @property
    def lasting(self) -> Transport:
        return BusTransport()

    def chosen(self, size_bytes: int, stream_bytes: int) -> Transport:
        bus = BusTransport()
        fits = bus.fits(size_bytes, stream_bytes)
        return bus if fits else HttpTransport(**self.model_dump(exclude={"type"}))


TransportConfig = Annotated[
    AutoTransport | BusTransport | HttpTransport | FilesTransport, Field(discriminator="type")
]
TRANSPORTS: dict[str, type[Transport]] = {
    scheme: kind for kind in get_args(get_args(TransportConfig)[0]) for scheme in kind.schemes
}
"""Transports by the scheme of the URL in a reference."""


class PeerConfig(ServerConfig):
    """How an actor process passes parts of weights on that it fetches over HTTP."""

    serve: bool = True
    """Whether others get parts of weights from here."""
    model: Path | None = None
    """Directory of the model on this host: parts of the first weights that its files have are not fetched.
    Without it that of `model.path` is taken, if it is here or in the hub's cache."""
    keep_bytes: int = Field(4 << 30, ge=0)
    """Memory for weights that are kept a minute for others only; the newest version is kept anyway."""
