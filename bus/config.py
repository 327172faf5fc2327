"""The pydantic base of every configuration section, and the section that names the bus."""

from pydantic import BaseModel, ConfigDict, Field


class Config(BaseModel):
    """Frozen, refuses unknown keys, and takes each field's description from the docstring under it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class BusConfig(Config):
    """Where the bus is and how long to wait for it."""

    url: str = "nats://127.0.0.1:4222"
    """NATS server, as nats://[user:password@]host:port; several separated by commas."""

    connect_timeout_s: float = Field(10.0, gt=0)
    """How long start-up waits for the bus before it gives up."""

    join_timeout_s: float = Field(60.0, gt=0)
    """How long a learner or actor waits for the run's storage before it gives up."""


class ColocationConfig(Config):
    """Whether the learner and the actors of its host take turns on its devices."""

    enabled: bool = False
    """While the learner trains, engines on its host stand still and free their memory; while it waits for a
    batch, they have it. Actors on other hosts go on. An actor with devices of its own says false."""

    lapse_s: float = Field(15.0, ge=3)
    """Who was not heard of for so long is taken for dead: then a learner's hold ends, and the learner waits
    no longer for an actor. Both are heard of every second."""

    yield_timeout_s: float = Field(1800.0, gt=0)
    """Longest that the learner waits for the actors' engines to free their devices, one that is just starting
    included; then it ends with an error that names them."""
