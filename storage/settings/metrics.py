"""Settings of where metrics go besides metrics.jsonl."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from bus.config import Config


class WandbConfig(Config):
    """A run of Weights & Biases that shows the metrics."""

    project: str | None = Field(None, min_length=1)
    """Name of the project; None writes nothing there. The host of storage needs `sluice-rl[wandb]` and, for
    `online`, WANDB_API_KEY in its environment."""
    entity: str | None = None
    """User or team that the project belongs to; None is the default of the key."""
    mode: Literal["online", "offline"] = "online"
    """Whether rows are sent at once. `offline` writes them under `wandb` of the run's directory, for
    `wandb sync`."""


class MetricsConfig(Config):
    """Where metrics go besides metrics.jsonl. Storage writes them."""

    tensorboard: bool = False
    """Whether event files are written for TensorBoard; it needs `sluice-rl[tensorboard]`."""
    tensorboard_directory: Path | None = None
    """Directory of the event files; None is `tensorboard` in the run's directory."""
    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""
    otlp_url: str | None = Field(None, pattern=r"^https?://[^/@]+(/.*[^/])?$")
    """Collector of OpenTelemetry (OTLP over HTTP), as `http://host:4318`, without a password: all of the run
    may read it. Storage sends metrics, learner and actors send spans of steps, publications and rollouts;
    their hosts need `sluice-rl[otlp]`."""
