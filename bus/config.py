"""The pydantic base of every configuration section, and the section that names the bus."""

import re

from pydantic import BaseModel, ConfigDict, Field

_CREDENTIALS = re.compile(r"(?<=://)[^/,\s]+(?=@)")


class Config(BaseModel):
    """Base of a section: frozen, refusing unknown keys, each field described by the docstring under it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class BusConfig(Config):
    """Address of the bus, and how long processes wait for it."""

    url: str = "nats://127.0.0.1:4222"
    """NATS server, as nats://[user:password@]host:port; commas separate several servers."""

    connect_timeout_s: float = Field(10.0, gt=0)
    """Longest time that a starting process waits for the bus before it ends with status 75."""

    join_timeout_s: float = Field(60.0, gt=0)
    """Longest time that a learner or actor waits for the run's storage before it ends with status 75."""

    patience_s: float = Field(3600.0, gt=0)
    """Longest time that a running process waits for a bus or a storage that is away. Then it goes on where it
    was; after this time it ends with status 75, which means that it may be started again."""


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
