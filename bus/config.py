"""The pydantic base of every configuration section, and the section that names the bus."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_serializer

URL_VARIABLE = "SLUICE_BUS"
"""Environment variable with the URL of the bus for a process without --bus; others do not see it."""
LOG_FORMAT_VARIABLE = "SLUICE_LOG_FORMAT"
"""Environment variable with the format of the log, `text` or `json`."""
LEAST_TEMPERATURE = 0.01
"""Smallest temperature that is trained: gradients grow with 1 / temperature, and below 1e-6 SGLang takes the
likeliest token and reports log-probs at 1."""
MOST_KEPT = 1024
"""Most tokens of a kept set (`bus.kept_sets`), which bounds what it takes on the wire and in the learner's
memory: 4 bytes a token that is kept."""
MOST_PROFILED_STEPS = 100
"""Most steps of one profile (`launch profile`): a trace of more is too large to be looked at."""
LEAST_SHARED = 32
"""Fewest tokens in common for which the learner computes them once. Attention has a call of its own for each
level of segments that others follow, which a few common tokens are not worth."""
Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
"""Values as JSON has them, which a metadata field may hold."""
_CREDENTIALS = re.compile(r"(?<=://)[^/,\s]+(?=@)")


def http_url(url: str) -> str:
    """Return the URL. Raises ValueError for what is no URL of a server."""
    if not url.startswith(("http://", "https://")):
        raise ValueError("is no URL: write it as http://host:port or https://host/path")
    return url


HttpUrl = Annotated[str, AfterValidator(http_url)]
"""URL of a server, as it is written."""


class Config(BaseModel):
    """Base of a section: frozen, refusing unknown keys, each field described by the docstring under it.

    `launch.settings.tree.describe` reads those docstrings. Pydantic would do so in every process that
    starts, for which it parses the source of each section."""

    # infinite bounds are "Infinity" in a run's config.json, since JSON has no number for them
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class StreamsConfig(Config):
    """The run's streams on the bus. An operator may give a stream more later: that is left as it is."""

    replicas: int = Field(1, ge=1, le=5)
    """Servers of a cluster that keep each stream: 3 survive the loss of one."""
    tasks_mib: int = Field(256, ge=16)
    """Largest size of the stream of leases and evaluation tasks."""
    trajectories_mib: int = Field(1024, ge=16)
    """Largest size of the streams of trajectories that storage has not taken, together: each shard's has the
    same part of it, 16 MiB at least. Actors wait when the stream is full that they publish to. Routed experts
    that actors send to shards themselves may take as much again on the shards' disks."""
    outcomes_mib: int = Field(256, ge=16)
    """Largest size of the stream of rejections, late rewards and answers to held-out prompts that storage has
    not taken yet."""
    weights_mib: int = Field(2048, ge=16)
    """Largest size of the stream of weights, for the transport `bus`; the oldest go when it is full."""
    files_mib: int = Field(512, ge=16)
    """Largest size of the stream of model files and prompts."""
    events_mib: int = Field(256, ge=16)
    """Largest size of the stream of metrics and evaluation results; the oldest go when it is full."""
    dead_mib: int = Field(256, ge=16)
    """Largest size of the stream of messages that were set aside; the oldest go when it is full."""


class BusConfig(Config):
    """Address of the bus, and how long processes wait for it."""

    url: str = "nats://127.0.0.1:4222"
    """NATS server, as nats://[user:password@]host:port; commas separate several servers."""
    creds: Path | None = None
    """Credentials file of this process, which `launch bus --secure` made."""
    domain: str | None = Field(None, pattern=r"^[^\s.*>$]+$")
    """JetStream domain of the servers that keep the run's streams, for a process that connects to a leaf
    node. `None` means the JetStream of the server that it connects to."""
    connect_timeout_s: float = Field(10.0, gt=0)
    """Longest time that a starting process waits for the bus before it ends with status 75."""
    join_timeout_s: float = Field(60.0, gt=0)
    """Longest time that a learner or actor waits for the run's storage before it ends with status 75."""
    streams: StreamsConfig = StreamsConfig()
    patience_s: float = Field(3600.0, gt=0)
    """Longest time that a running process waits for a bus or a storage that is away. Then it goes on where it
    was; after this time it ends with status 75, which means that it may be started again."""

    @field_serializer("url", when_used="json")
    def _without_password(self, url: str) -> str:
        """Keep user and password out of files and keys, which others may read."""
        return without_credentials(url)


class AllowConfig(Config):
    """What this host lets a run do here. It comes from this host alone, never from the run's record."""

    plugins_from: tuple[Path, ...] = ()
    """Directories of the modules that a run may import here, besides what is built in; links that lead out
    of them do not count. Without any, a module may lie anywhere."""
    engine_python: Path | None = None
    """Interpreter that SGLang's servers run with here, whatever the run's record names; their environment
    variables are then this host's own as well."""
    insecure: bool = False
    """Whether to import and run what the record names on a bus beyond loopback that asks for no credentials:
    for a network that is yours alone."""


class ColocationConfig(Config):
    """Sets whether the learner and the actors of its host take turns on its devices."""

    enabled: bool = False
    """Engines on the learner's host stop and free their memory while it trains, and have the memory while it
    waits for a batch. Actors on other hosts go on. Set it to false for an actor with devices of its own."""
    lapse_s: float = Field(15.0, ge=3)
    """Seconds of silence after which a process counts as dead: a learner's claim on the devices ends, and the
    learner stops waiting for an actor. Both send a sign of life every second."""
    yield_timeout_s: float = Field(1800.0, gt=0)
    """Longest time that the learner waits for engines, also for one that is starting, to free their devices.
    Then it ends with an error that names them."""


def without_credentials(text: str) -> str:
    """Replace user, password or token by `***` in every URL of `text`, for logs, errors and files."""
    return _CREDENTIALS.sub("***", text)
