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
