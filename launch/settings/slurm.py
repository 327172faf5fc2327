"""What `launch slurm` asks a Slurm cluster for."""

from typing import Self

from pydantic import Field, field_validator, model_validator

from bus.config import Config


class SlurmConfig(Config):
    """Sets the jobs of `launch slurm`: one of `learner.world.nodes` nodes, and an array of actors."""

    partition: str | None = None
    """Partition of both jobs; None takes the cluster's default."""
    account: str | None = None
    """Account that is charged; None takes your default."""
    time_limit_min: int = Field(1440, ge=1)
    """Time limit of each job in minutes."""
    signal_s: int = Field(300, ge=0, le=65535)
    """Seconds before the time limit at which the learner saves a checkpoint and its job is requeued, and at
    which an actor hands on what it does not finish. Preemption does the same where the cluster has
    `preempt_send_user_signal` among its `SlurmctldParameters`."""
    gpus_per_node: int = Field(8, ge=0)
    """GPUs that are asked for on each node; 0 asks for none."""
    actors: int = Field(1, ge=1)
    """Jobs of the array of actors, each with the nodes of one engine (`actors.engine.nodes`)."""
    options: tuple[str, ...] = ("--exclusive", "--mem=0")
    """Further options of sbatch for both jobs, such as `--qos=high`, which win over those above."""
    actor_options: tuple[str, ...] = ()
    """Further options of sbatch for actors, such as `--partition=spot`, which win over `options`."""
    setup: tuple[str, ...] = ()
    """Lines of bash that each job runs first, such as `module load cuda`."""
    look_s: int = Field(60, ge=1)
    """Seconds between two looks of an actor's job at the learner's: whether that has another address since it
    was requeued, or is no longer there, which ends the actor."""

    @field_validator("options", "actor_options")
    @classmethod
    def _are_options(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        for option in options:
            if not option.startswith("-") or "\n" in option:
                raise ValueError(f"{option!r} is no option of sbatch: write it as --name=value")
        return options

    @model_validator(mode="after")
    def _jobs_have_time(self) -> Self:
        if self.time_limit_min * 60 <= 2 * self.signal_s:
            raise ValueError(
                f"time_limit_min={self.time_limit_min} leaves little before signal_s={self.signal_s}: jobs "
                "would be requeued over and over; give more minutes, or fewer seconds"
            )
        return self
